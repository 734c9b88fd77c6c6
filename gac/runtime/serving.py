"""What servers need of a compressed model, and transformers itself does not."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from .contract import LAYOUT, VLLM
from .header import HEAD, header_value, own_name, weights_of
from .modules import Absent
from .serving_split import keep_from_merging, tell_vllm


def show_to_serve(model_class: type) -> None:
    """Let ``transformers serve``, if that is running, find a class: it looks up the architecture in transformers.

    It has to be the server's own ``transformers`` module: another one is made when transformers loads parts of itself.
    """
    manager = sys.modules.get("transformers.cli.serving.model_manager")
    if manager is not None:
        setattr(manager.transformers, model_class.__name__, model_class)


def prepare_for_vllm(model: Any, names: Iterable[str]) -> None:
    """Let vLLM, if it builds the model, merge only weights that are still linear.

    Its Transformers backend replaces every ``nn.Linear`` by a layer of its own, and merges those that read the same
    input. It decides what to merge once for all modules of the same class whose children have the same names. So a
    module in which a weight is no longer linear gets one more child, which does nothing and has a name of its own.
    Weights that are stored in other ways are not merged: such modules get a class that cannot be traced.

    Args:
        names: of the weights that were replaced, in the model.

    Where it splits the model over several GPUs, it is told how, see ``gac.runtime.serving_split``.

    Raises:
        ValueError: a weight is stored in a way that it cannot read, a layer has fewer heads than the others, or its
            GPUs cannot have the same number of heads each.
    """
    if model.config._attn_implementation != VLLM:
        return
    names = list(names)
    _check_heads(model, names)
    groups = _groups_of(model)
    _check_readable(model, groups)
    _keep_apart(model, groups)
    tell_vllm(model)
    others: dict[str, list[str]] = {}
    for name in names:
        owner, _, child = name.rpartition(".")
        if not isinstance(replaced := model.get_submodule(name), nn.Linear):
            others.setdefault(owner, []).append(f"{child}_{type(replaced).__name__}")
    for owner, children in others.items():
        model.get_submodule(owner).add_module("with_" + "_".join(sorted(children)), nn.Identity())


def _groups_of(model: Any) -> dict[str, str]:
    """By name in the model, which config group a linear weight is in, as vLLM reads them."""
    layout = getattr(model.config, LAYOUT, None) or {}
    groups = layout.get("config_groups", {}).items()
    return {own_name(model, target): group for group, described in groups for target in described["targets"]}


def _check_readable(model: Any, groups: Mapping[str, str]) -> None:
    """All that is in a storage is a linear weight that ``quantization_config`` describes."""
    if (head := header_value(model.config, HEAD)) is not None:
        raise ValueError(
            f"embedding and head are in {head.get('scheme')}; expected them in 16 or 32 bits, which is all that vLLM "
            "can read here. Serve it with transformers, or plan without head."
        )
    for name, described in weights_of(model.config).items():
        if "storage" not in described:
            continue
        weight = model.get_submodule(own_name(model, name))
        for path, module in weight.named_modules(prefix=own_name(model, name)):
            linear = isinstance(module, nn.Linear) and path in groups
            if getattr(module, "weight", None) is not None and not linear:
                raise ValueError(
                    f"{path} is a {type(module).__name__} in {described.get('scheme')}; expected a linear weight that "
                    "quantization_config describes, which is all that vLLM can read here. Serve it with transformers."
                )


def _keep_apart(model: nn.Module, groups: Mapping[str, str]) -> None:
    """Let vLLM merge nothing in modules where linear weights of the same input size are stored in several ways."""
    for path, owner in list(model.named_modules()) if groups else ():
        ways: dict[int, set[str | None]] = {}
        for name, child in owner.named_children():
            if isinstance(child, nn.Linear):
                ways.setdefault(child.in_features, set()).add(groups.get(f"{path}.{name}"))
        if any(len(found) > 1 for found in ways.values()):
            keep_from_merging(owner)


def _check_heads(model: Any, names: Iterable[str]) -> None:
    """vLLM's attention has as many heads in every layer."""
    heads: int = model.config.get_text_config().num_key_value_heads
    for name in (name for name in names if name.endswith(".k_proj")):
        attention = model.get_submodule(name.rpartition(".")[0])
        if (kept := getattr(attention.k_proj, "out_features", 0) // attention.head_dim) != heads:
            raise ValueError(
                f"{name} has {kept} key-value heads; expected {heads} in every layer, which is all that vLLM's "
                "attention knows. Serve it with transformers, or plan without the form heads."
            )


def not_paged(model: Any) -> tuple[str, str, str] | None:
    """Say why transformers' paged cache does not fit the model: it has the same heads in every layer.

    Returns:
        What was found, what was expected, and what to do; None where it fits.
    """
    config = model.config.get_text_config()
    heads, remedy = config.num_key_value_heads, "Use generate, whose caches take each layer as it is."
    if model.tp_size is not None:
        return f"continuous batching of a model split over {model.tp_size} processes", "a whole model", remedy
    for name in weights_of(model.config):
        attention, _, projection = own_name(model, name).rpartition(".")
        if projection not in ("k_proj", "v_proj"):
            continue
        length = model.get_submodule(attention).head_dim
        module = model.get_submodule(f"{attention}.{projection}")
        written = module.out_features // (own := getattr(module, "length", length)), own
        if written != (heads, length) and not isinstance(module, Absent):
            given = "continuous batching of a model in which {} writes {} heads of {} numbers".format(name, *written)
            return given, f"{heads} of {length} in every layer, which is all that its paged cache holds", remedy
    return None
