"""A compressed model where GAC is installed: its plan comes with it."""

from typing import Any

from gac.checkpoint.header import agreed_plan, contradiction, digest_of
from gac.errors import CheckpointError
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
            config = vars(self)["config"]
            self._gac_plan = agreed_plan(self.gac_files["plan.json"], config, config.name_or_path or "the checkpoint")
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
        text, digest = model.gac_files.get("plan.json"), model.config.gac.get("plan")
        if text is None:
            raise CheckpointError(f"{source} has no plan.json", "every file that gac.save wrote", "Copy it whole.")
        if digest_of(text) != digest:
            given, expected = f"plan.json has digest {digest_of(text)[:12]}", f"{str(digest)[:12]}, as config.json says"
            raise contradiction(source, given, expected)
        return (model, report) if output_loading_info else model
