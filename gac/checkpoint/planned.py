"""A compressed model where GAC is installed: its plan comes with it, and transformers' own methods write it whole."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from gac.checkpoint.card import model_card
from gac.checkpoint.classes import auto_map, classes_of
from gac.checkpoint.header import agreed_plan, contradiction, digest_of, header_of
from gac.checkpoint.layout import layout_of
from gac.checkpoint.verify import write_digests
from gac.core.errors import CheckpointError, ModelError
from gac.core.io import to_json
from gac.models.plain import check_class
from gac.plan.plan import Plan
from gac.runtime.contract import COMPRESSED, LAYOUT
from gac.runtime.model import CompressedModel
from gac.runtime.storage.embeddings import embeddings_of

if TYPE_CHECKING:
    _Dense = PreTrainedModel
else:
    _Dense = object  # a mixin, before the class of the architecture


class PlannedModel(CompressedModel, _Dense):  # type: ignore[misc, no-untyped-call]  # as transformers has it
    """A compressed model with its plan, which is read when it is first asked for."""

    _gac_plan: Plan

    @property
    def gac_plan(self) -> Plan:
        """The plan that the model was compressed with; a CheckpointError if the checkpoint's cannot be read."""
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

    def _refusal(self, value: str, expected: str, remedy: str) -> Exception:
        return ModelError(value, expected, remedy)

    def _write_companions(self, directory: Path) -> None:
        super()._write_companions(directory)
        write_digests(directory)


def planned(model: PreTrainedModel) -> Plan:
    """The plan that a compressed model carries; a CheckpointError if it has none."""
    plan = getattr(model, "gac_plan", None)
    if not isinstance(plan, Plan):
        value = f"a {type(model).__name__} without a plan"
        raise CheckpointError(value, "a model from gac.compress or gac.load", "Compress it first.")
    return plan


def attach_plan(model: PreTrainedModel, plan: Plan) -> PlannedModel:
    """Make a model with the plan's modules in it one of the class that loads such models; it is changed in place.

    Its class becomes a subclass of what it was, and its config one that names the modules, so that ``save_pretrained``
    and ``push_to_hub`` write a whole checkpoint. A CheckpointError says if its class is none of transformers' own.
    """
    config = model.config
    classes = classes_of(config.model_type.removeprefix(COMPRESSED))
    if not isinstance(model, CompressedModel):
        check_class(model)
        model.__class__ = classes.causal_lm
    described = copy.deepcopy(config)
    described.__class__ = classes.config
    text = to_json(plan, indent=1).decode() + "\n"
    described.gac = header_of(plan, described, text)
    described.auto_map = auto_map(classes)
    vars(described).pop(LAYOUT, None)
    if (layout := layout_of(model, plan)) is not None:
        setattr(described, LAYOUT, layout)
    changed: Any = model
    for module in changed.modules():
        if getattr(module, "config", None) is config:
            module.config = described
    ends = [getattr(module, "weight", None) for module in embeddings_of(changed).values()]
    tied = len(ends) == 2 and ends[0] is not None and ends[0] is ends[1]
    if tied and not described.tie_word_embeddings:  # by hand; transformers would save one and miss it
        described.tie_word_embeddings = True
        changed.all_tied_weights_keys = changed.get_expanded_tied_weights_keys(all_submodels=True)
    changed.gac_plan = plan
    changed.gac_files = {"plan.json": text, "README.md": model_card(plan, model.dtype.itemsize)}
    planned_model: PlannedModel = changed
    return planned_model
