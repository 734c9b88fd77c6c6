"""What servers have to find in a compressed model; transformers itself never asks."""

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

_VLLM = "vllm"
"""How vLLM attends, as it registers it with transformers."""


def show_to_serve(model_class: type) -> None:
    """Let ``transformers serve``, where it is what runs, find a class: it looks in transformers, by the architecture.

    Not every module has the same transformers: loading one of its own parts makes it anew.
    """
    manager = sys.modules.get("transformers.cli.serving.model_manager")
    if manager is not None:
        setattr(manager.transformers, model_class.__name__, model_class)


def prepare_for_vllm(model: Any, names: Iterable[str]) -> None:
    """Let vLLM, where it is what builds the model, merge only weights that are still linear.

    Its Transformers backend puts layers of its own in the place of every ``nn.Linear``, and merges those that read the
    same input. What to merge it decides once for all modules of the same class with the same names of children. So a
    module in which a weight is something else gets one more child, which does nothing, and whose name says what.

    Args:
        names: of the weights that were replaced, in the model.

    Raises:
        ValueError: it was asked to split the weights.
    """
    if model.config._attn_implementation != _VLLM:
        return
    _check_not_split()
    others: dict[str, list[str]] = {}
    for name in names:
        owner, _, child = name.rpartition(".")
        if not isinstance(replaced := model.get_submodule(name), nn.Linear):
            others.setdefault(owner, []).append(f"{child}_{type(replaced).__name__}")
    for owner, children in others.items():
        model.get_submodule(owner).add_module("with_" + "_".join(sorted(children)), nn.Identity())


def _check_not_split() -> None:
    """Its plans for tensor parallelism name the dense weights."""
    size = sys.modules["vllm.distributed"].get_tensor_model_parallel_world_size()
    if size > 1:
        raise ValueError(
            f"tensor_parallel_size is {size}; expected 1: the weights of a compressed model are not split. "
            "Use data_parallel_size instead."
        )
