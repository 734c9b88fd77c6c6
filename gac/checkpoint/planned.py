"""A compressed model where GAC is installed: its plan comes with it, and transformers' own methods write it whole."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from gac.checkpoint.digests import write_digests
from gac.checkpoint.header import agreed_plan, contradiction, digest_of
from gac.core.errors import CheckpointError, ModelError
from gac.plan.plan import Plan
from gac.runtime.model import CompressedModel, not_paged

if TYPE_CHECKING:
    _Dense = PreTrainedModel
else:
    _Dense = object  # a mixin, before the class of the architecture


class PlannedModel(CompressedModel, _Dense):  # type: ignore[misc, no-untyped-call]  # as transformers has it
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

    def finish_loading(self: Any, source: Any, *args: Any, **options: Any) -> None:
        """As for any compressed model; its plan has to be the one that it was saved with."""
        super().finish_loading(source, *args, **options)
        text = self.gac_files.get("plan.json")
        if text is None:
            raise CheckpointError(f"{source} has no plan.json", "every file that gac.save wrote", "Copy it whole.")
        digest = self.config.gac.get("plan")
        if digest_of(text) != digest:
            value = f"plan.json has digest {digest_of(text)[:12]}"
            raise contradiction(source, value, f"{str(digest)[:12]}, as config.json says")

    def init_continuous_batching(self: Any, *args: Any, **options: Any) -> Any:
        """As for any compressed model."""
        if (wrong := not_paged(self)) is not None:
            raise ModelError(*wrong)
        return super().init_continuous_batching(*args, **options)

    def _write_companions(self, directory: Any) -> None:
        super()._write_companions(directory)
        write_digests(Path(directory))


def planned(model: PreTrainedModel) -> Plan:
    """The plan that a compressed model carries.

    Raises:
        CheckpointError: it has none.
    """
    plan = getattr(model, "gac_plan", None)
    if not isinstance(plan, Plan):
        value = f"a {type(model).__name__} without a plan"
        raise CheckpointError(value, "a model from gac.compress or gac.load", "Compress it first.")
    return plan
