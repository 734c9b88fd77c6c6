"""Modules of a model in the place of others."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn


def swap_in(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Replace each named submodule."""
    for name, module in modules.items():
        model.set_submodule(name, module)


@contextmanager
def swapped(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """With these modules in the place of those of the same names."""
    before = {name: model.get_submodule(name) for name in modules}
    try:
        swap_in(model, modules)
        yield
    finally:
        swap_in(model, before)


def input_device(model: Any) -> torch.device:
    """Where a model looks up tokens."""
    embedding: nn.Module = model.get_input_embeddings()
    device = next(chain(embedding.parameters(), embedding.buffers())).device
    hook: Any = getattr(embedding, "_hf_hook", None)  # of accelerate, where the weights lie elsewhere
    return torch.device(hook.execution_device) if device.type == "meta" and hook is not None else device


def run_on(model: Any, ids: torch.Tensor) -> Any:
    """What a causal LM returns for token ids ``(windows, tokens)``, without a cache."""
    return model(input_ids=ids.to(input_device(model)), use_cache=False)


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that are free, with those that PyTorch holds and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + unused)
