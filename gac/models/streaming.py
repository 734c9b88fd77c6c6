"""Models larger than a GPU: their weights lie in host memory, and each module's come to the GPU while it runs.

What transformers reads from safetensors lies in the mapped file, so that all processes of a host share its pages.
"""

import importlib.util
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gac.errors import ModelError
from gac.models.modules import free_memory
from gac.models.moving import moved

logger = logging.getLogger(__name__)

SHARE = 0.6
"""How much of a GPU's free memory weights may take: moments, hidden states and decompositions need the rest."""


def placed(model: Any, device: torch.device) -> Any:
    """The model on a device, or streamed to it where it is too large.

    Raises:
        ModelError: it has to be streamed, and accelerate is not installed.
    """
    size = sum(values.numel() * values.element_size() for values in model.parameters())
    if device.type != "cuda" or size <= SHARE * free_memory(device):
        return moved(model, device)
    logger.info("weights of %.0f GB stay in host memory; each layer comes to %s as it runs", size / 1e9, device)
    return streamed(model, device)


def streamed(model: Any, device: torch.device | str) -> Any:
    """A model in host memory whose modules run on a device, each with its weights there for as long.

    Raises:
        ModelError: accelerate is not installed.
    """
    if importlib.util.find_spec("accelerate") is None:
        given = f"a {type(model).__name__} that does not fit the GPU"
        raise ModelError(given, "accelerate, which brings layers to the GPU in turn", "pip install accelerate.")
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=device)


@contextmanager
def on_its_device(module: nn.Module, without: Iterable[nn.Module] = ()) -> Iterator[None]:
    """With the weights of a module on its device from the first call to the last, where they lie elsewhere.

    Args:
        without: modules in it whose weights stay where they are.
    """
    left_out = {inner for one in without for inner in one.modules()}
    inside = (one for one in module.modules() if one not in left_out)
    hooked = [one for one in inside if getattr(getattr(one, "_hf_hook", None), "offload", False)]
    hooks: list[Any] = [one._hf_hook for one in hooked]
    try:
        for one, hook in zip(hooked, hooks, strict=True):
            hook.pre_forward(one)
            hook.offload = False
        yield
    finally:
        for one, hook in zip(hooked, hooks, strict=True):
            if not hook.offload:
                hook.offload = True
                hook.post_forward(one, None)
