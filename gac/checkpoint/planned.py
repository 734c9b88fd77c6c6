"""A compressed model where GAC is installed: its plan comes with it."""

from functools import partial
from typing import Any

from gac.checkpoint.agreement import agreed_plan, check_digest
from gac.errors import CheckpointError
from gac.io import from_json
from gac.plan import Plan
from gac.runtime.compressed import CompressedModel


class PlannedModel(CompressedModel):
    """A compressed model with its plan, which is read when it is first asked for."""

    _gac_plan: Plan

    @property
    def gac_plan(self) -> Plan:
        """The plan that the model was compressed with.

        Raises:
            CheckpointError: the checkpoint's plan cannot be read, or is not the one that its config was made from.
        """
        if "_gac_plan" not in vars(self):
            if "plan.json" not in vars(self).get("gac_files", {}):
                raise AttributeError(f"this {type(self).__name__} was not read from a checkpoint")
            model: Any = self
            text, source = self.gac_files["plan.json"], model.config.name_or_path or "the checkpoint"
            read = partial(from_json, Plan, text, "plan.json", CheckpointError)
            self._gac_plan = agreed_plan(read, model.config, source, "config.json, key gac")
        return self._gac_plan

    @gac_plan.setter
    def gac_plan(self, plan: Plan) -> None:
        self._gac_plan = plan

    @classmethod
    def from_pretrained(cls: Any, source: Any, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """As for any transformers model.

        Raises:
            CheckpointError: the plan is missing, or not the one that the weights were saved with.
            ValueError, OSError: as transformers does for what it cannot read.
        """
        model, report = super().from_pretrained(source, *args, output_loading_info=True, **options)
        check_digest(source, model.gac_files.get("plan.json"), model.config.gac.get("plan"))
        return (model, report) if output_loading_info else model
