"""A model that carries its plan: transformers' own methods save, push and load it whole."""

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from gac.checkpoint.card import model_card
from gac.checkpoint.digest import sealed
from gac.checkpoint.header import Header, header_of, read_header
from gac.checkpoint.standalone import FILE, auto_map, source_for
from gac.errors import CheckpointError, GacError, ModelError
from gac.io import from_json, to_json
from gac.models.families import COMPRESSED, family_of
from gac.models.sites import Site
from gac.plan import Plan
from gac.runtime.modeling import CompressedModel


class PlannedModel(CompressedModel):
    """A compressed model where GAC is installed: its plan comes along, read when it is first asked for."""

    _gac_plan: Plan

    @property
    def gac_plan(self) -> Plan:
        """The plan that the model was compressed by.

        Raises:
            CheckpointError: the plan in the checkpoint is none, or not the one that its config was made by.
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
        """As of any transformers model.

        Raises:
            CheckpointError: there is no plan, or not the one that the weights were saved with.
            ValueError, OSError: as transformers does for what it cannot read.
        """
        model, report = super().from_pretrained(source, *args, output_loading_info=True, **options)
        _check_plan(source, model.gac_files.get("plan.json"), model.config.gac.get("plan"))
        return (model, report) if output_loading_info else model


def carry_plan(model: PreTrainedModel, plan: Plan) -> None:
    """Make a model that was compressed in memory one of the class that loads such models; it is changed in place.

    Its class becomes a subclass of what it was, and its config one that names the modules, so that
    ``save_pretrained`` and ``push_to_hub`` write a whole checkpoint.

    Args:
        model: with the plan's modules in it.

    Raises:
        CheckpointError: its class is none of transformers' own causal LMs.
    """
    from gac.checkpoint.classes import classes_of

    config = model.config
    model_type = config.model_type.removeprefix(COMPRESSED)
    classes = classes_of(model_type)
    if not isinstance(model, CompressedModel):
        check_class(model)
        model.__class__ = classes.causal_lm
    described = copy.deepcopy(config)
    described.__class__ = classes.config
    text = to_json(plan, indent=1).decode() + "\n"
    sites = family_of(config).sites(config)
    described.gac = sealed(header_of(plan, sites, digest_of(text)), described)
    described.auto_map = auto_map(model_type)
    carried: Any = model
    for module in carried.modules():
        if getattr(module, "config", None) is config:
            module.config = described
    carried.gac_plan = plan
    carried.gac_files = {
        "plan.json": text,
        "README.md": model_card(plan),
        f"{FILE}.py": source_for(model_type),
    }


def check_dense(model: PreTrainedModel) -> None:
    """Refuse a model that is compressed already.

    Raises:
        ModelError: it is.
    """
    if isinstance(model, CompressedModel):
        raise ModelError(
            f"a {type(model).__name__}, which is compressed", "a dense model", "Load the one it came from."
        )


def check_class(model: PreTrainedModel) -> None:
    """Refuse a dense model of a class that no checkpoint can name.

    Raises:
        CheckpointError: it is not transformers' own causal LM of its architecture.
    """
    dense: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]
    if type(model) is not dense:
        raise CheckpointError(
            f"a {type(model).__name__}", f"a {dense.__name__} of transformers", "Load it with AutoModelForCausalLM."
        )


def _check_plan(source: Any, text: str | None, digest: Any) -> None:
    if text is None:
        raise CheckpointError(f"{source} has no plan.json", "every file that gac.save wrote", "Copy it whole.")
    if digest_of(text) != digest:
        raise contradiction(
            source, f"plan.json has digest {digest_of(text)[:12]}", f"{str(digest)[:12]}, as config.json says"
        )


def agreed_plan(read: Callable[[], Plan], config: Any, source: Any, where: str) -> Plan:
    """The plan of a checkpoint, with which the key ``gac`` of its config and the dims in it agree.

    Args:
        read: reads the plan.
        source: how to name the checkpoint in an error.
        where: how to name the key.

    Raises:
        CheckpointError: they do not, or one of them is damaged.
    """
    header = read_header(getattr(config, "gac", None), where)
    plan = own_plan(read)
    check_agrees(header, plan, family_of(config).sites(config), source)
    return plan


def own_plan(read: Callable[[], Plan]) -> Plan:
    """What ``read`` reads, the plan of a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return read()
    except GacError as failure:
        raise CheckpointError(failure.given, failure.expected, "Save the model again.") from failure


def digest_of(text: str | bytes) -> str:
    """SHA-256 of a plan's file."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def check_agrees(header: Header, plan: Plan, sites: Sequence[Site], source: Any) -> None:
    """The plan's weights are weights of the config, with its dims, and the modules that the config names the plan's.

    Args:
        header: what the config says.
        sites: those of its family.
        source: how to name what both were read from.

    Raises:
        CheckpointError: names the first that is not.
    """
    _check_against_family(source, sites, plan)
    planned = replace(header_of(plan, sites, header.plan), seal=header.seal)
    if header == planned:
        return
    stated, due = header.modules, planned.modules
    names = sorted(name for name in {*stated, *due} if stated.get(name) != due.get(name))
    given, expected = (
        f"{names[0]} {one.modules.get(names[0], 'dense')}"
        if names
        else f"fused {list(one.fused)}, one_row {one.one_row}"
        for one in (header, planned)
    )
    raise contradiction(source, f"config.json has {given}", f"{expected}, as plan.json says")


def _check_against_family(source: Any, sites: Sequence[Site], plan: Plan) -> None:
    weights = {weight.name: weight for site in sites for weight in site.weights}
    for choice in plan.weights:
        weight = weights.get(choice.name)
        if weight is None:
            raise contradiction(source, f"plan.json names the weight {choice.name}", "a weight that config.json has")
        dims = (choice.out_features, choice.in_features, choice.neurons, choice.blocks)
        if dims != (weight.out_features, weight.in_features, weight.neurons, weight.blocks) or (
            choice.values and (choice.values, choice.heads) != (weight.values, weight.heads)
        ):
            raise contradiction(
                source,
                f"plan.json has {choice.name} {choice.out_features} x {choice.in_features}",
                f"{weight.out_features} x {weight.in_features}, as config.json says",
            )


def contradiction(source: Any, given: str, expected: str) -> CheckpointError:
    """The error for files of a checkpoint that do not belong together."""
    return CheckpointError(f"{source}: {given}", expected, "Save the model again; these files were changed.")
