"""A compressed model as one of its stock architecture, for tools that know nothing of GAC."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gac.checkpoint.card import export_card
from gac.checkpoint.header import Module, header_of
from gac.checkpoint.target import check_free, complete_directory
from gac.compression.modules import merged
from gac.errors import CheckpointError
from gac.models.families import family_of
from gac.models.loading import check_in_memory
from gac.plan import Plan, WeightChoice
from gac.runtime.contract import COMPRESSED


def export_plain(model: PreTrainedModel, directory: str | Path, tokenizer: Any = None, *, merge: bool = False) -> None:
    """Write a directory of the stock architecture, that appears whole or not at all.

    Args:
        model: made by ``gac.compress`` or ``gac.load``.
        merge: multiply low-rank pairs out and fill with zeros what was shortened, up to the dense dims: the same
            function up to rounding, with as many parameters as the dense model. Without it the dims stay, which a
            stock config can say only where MLPs alone are narrower, by as much in every layer.

    Raises:
        CheckpointError: the model carries no plan, a stock config cannot say its dims, or the directory is in use or
            cannot be written.
        ModelError: a weight is not in memory.
    """
    plan, target = getattr(model, "gac_plan", None), Path(directory).resolve()
    if not isinstance(plan, Plan):
        raise CheckpointError(
            f"a {type(model).__name__} without a plan", "a model from gac.compress or gac.load", "Compress it first."
        )
    check_in_memory(model)
    config = _dense_config(model.config)
    if not merge:
        config = _with_fewer_neurons(config, plan)
    plain = _empty(model, config)
    state = _state(model, plain, plan, merge)
    check_free(target, overwrite=False)
    with complete_directory(target) as part:
        plain.generation_config = model.generation_config
        plain.save_pretrained(part, state_dict=state)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        (part / "README.md").write_text(export_card(plan, merge), encoding="utf-8")


def _dense_config(config: Any) -> Any:
    dense = copy.deepcopy(config)
    dense.model_type = dense.model_type.removeprefix(COMPRESSED)
    dense.__class__ = CONFIG_MAPPING[dense.model_type]
    del dense.gac, dense.auto_map
    return dense


def _with_fewer_neurons(config: Any, plan: Plan) -> Any:
    """The config with the width that all MLPs have, where that is all there is to say of the plan."""
    modules = header_of(plan, family_of(config).sites(config)).modules
    choices = {choice.name: choice for choice in plan.weights}
    widths = [one.sizes["in_features"] for choice in plan.weights if (one := _shortened(choice, modules))]
    stock = copy.deepcopy(config)
    if widths:
        setattr(stock, family_of(config).neurons, widths[0])
    for site in family_of(stock).sites(stock):
        for weight in site.weights:
            found, was = modules.get(weight.name), choices[weight.name].weight
            dims = {"in_features": weight.in_features, "out_features": weight.out_features}
            sizes = found.sizes if found else {"in_features": was.in_features, "out_features": was.out_features}
            if sizes != dims or (found and found.module != nn.Linear.__name__):
                raise CheckpointError(
                    f"{weight.name} is {found or f'dense, {was.out_features} x {was.in_features}'}",
                    "a plan that a stock config can say: fewer neurons, as many in every layer, and no more",
                    "Export it merged (--merge, merge=True), with the dense dims; or open the checkpoint as it is.",
                )
    return stock


def _shortened(choice: WeightChoice, modules: Mapping[str, Module]) -> Module | None:
    """What became of a weight that reads an MLP's neurons, where it is one GEMM still."""
    found = modules.get(choice.name) if choice.weight.neurons == "in" else None
    return found if found and found.module == nn.Linear.__name__ else None


def _empty(model: Any, config: Any) -> Any:
    """The dense class without values, to say what is stored how."""
    dense = next(base for base in type(model).__mro__ if base.__module__.startswith("transformers."))
    with torch.device("meta"):
        return dense(config).to(model.dtype)


def _state(model: nn.Module, plain: nn.Module, plan: Plan, merge: bool) -> dict[str, Tensor]:
    """The plain model's parameters, under its names, in its layout."""
    state = {name: value.detach() for name, value in model.state_dict().items()}
    for choice in plan.weights:
        if choice.form == "dense":
            continue
        own = {name: state.pop(name) for name in [*state] if name.startswith(f"{choice.name}.")}
        own = {name.removeprefix(f"{choice.name}."): value for name, value in own.items()}
        if merge:
            own = merged(choice, own)
        if isinstance(plain.get_submodule(choice.name), Conv1D):
            own["weight"] = own["weight"].T
        state |= {f"{choice.name}.{name}": value.contiguous() for name, value in own.items()}
    return state
