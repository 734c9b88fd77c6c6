"""What servers need of a compressed model, and transformers itself does not."""

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from .stored import stored_modules

_VLLM = "vllm"
"""The name of vLLM's attention in transformers."""


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

    Args:
        names: of the weights that were replaced, in the model.

    Raises:
        ValueError: vLLM is to split the weights, weights are in a storage, or a layer has fewer heads than the others.
    """
    if model.config._attn_implementation != _VLLM:
        return
    names = list(names)
    _check_not_split()
    _check_plain(model)
    _check_heads(model, names)
    others: dict[str, list[str]] = {}
    for name in names:
        owner, _, child = name.rpartition(".")
        if not isinstance(replaced := model.get_submodule(name), nn.Linear):
            others.setdefault(owner, []).append(f"{child}_{type(replaced).__name__}")
    for owner, children in others.items():
        model.get_submodule(owner).add_module("with_" + "_".join(sorted(children)), nn.Identity())


def _check_not_split() -> None:
    """vLLM's plans for tensor parallelism name the dense weights."""
    size = sys.modules["vllm.distributed"].get_tensor_model_parallel_world_size()
    if size > 1:
        raise ValueError(
            f"tensor_parallel_size is {size}; expected 1: the weights of a compressed model are not split. "
            "Use data_parallel_size instead."
        )


def _check_plain(model: Any) -> None:
    """vLLM reads parameters alone, and all of them in the model's dtype."""
    if stored := stored_modules(model):
        name, module = next(iter(stored.items()))
        raise ValueError(
            f"{name} is {module}; expected weights in 16 or 32 bits, which are all that vLLM can read here. "
            "Serve it with transformers."
        )


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
