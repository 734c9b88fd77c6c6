"""Models larger than a GPU: their layers are spread over all GPUs, or streamed to one.

Streamed weights stay in host memory, and those of each module are copied to the GPU while it runs. Weights that
transformers reads from safetensors stay in the mapped file, so that all processes of a host share its pages.
"""

import importlib.util
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gac.core.errors import ModelError
from gac.models.modules import free_memory
from gac.models.moving import moved

logger = logging.getLogger(__name__)

SHARE = 0.6
"""Share of a GPU's free memory for weights: moments, hidden states and decompositions need the rest."""
FULL = 0.9
"""Share above which a model is too large for one GPU."""


def placed(model: Any, device: torch.device) -> Any:
    """The model on a device, or streamed to it where it is too large.

    Raises:
        ModelError: it has to be streamed, and accelerate is not installed.
    """
    size = _size(model)
    if device.type != "cuda" or size <= SHARE * free_memory(device):
        return moved(model, device)
    logger.info("weights of %.0f GB stay in host memory; each layer comes to %s as it runs", size / 1e9, device)
    return streamed(model, device)


def spread(model: Any, device: torch.device) -> Any:
    """The model on a device, or whole layers of it on each GPU of this host where it is too large for one.

    Args:
        device: no other GPU is taken where it names one by number.

    Raises:
        ModelError: all GPUs together have too little room, or accelerate is not installed.
    """
    count, size = torch.cuda.device_count(), _size(model)
    alone = device.type != "cuda" or device.index is not None or count == 1
    if alone or size <= FULL * free_memory(torch.device("cuda", 0)):
        return moved(model, device)
    _check_accelerate(model)
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    unsplit = sorted(model._no_split_modules or ())
    room: dict[Any, int] = {gpu: int(SHARE * free_memory(torch.device("cuda", gpu))) for gpu in range(count)}
    places = infer_auto_device_map(model, get_balanced_memory(model, room, unsplit), unsplit)
    if not room.keys() >= set(places.values()):
        fits = f"{count} GPUs with room for {sum(room.values()) / 1e9:.0f} GB"
        raise ModelError(
            f"a {type(model).__name__} of {size / 1e9:.0f} GB, and {fits}",
            f"GPUs whose free memory holds the weights in {SHARE:.0%} of it",
            'Take more GPUs, or load the model with device_map="cpu".',
        )
    logger.info("weights of %.0f GB are spread over %d GPUs", size / 1e9, len({*places.values()}))
    return dispatch_model(model, places)


def streamed(model: Any, device: torch.device | str) -> Any:
    """A model in host memory whose modules run on a device, each with its weights there for as long.

    Raises:
        ModelError: accelerate is not installed.
    """
    _check_accelerate(model)
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=device)


def _check_accelerate(model: Any) -> None:
    if importlib.util.find_spec("accelerate") is None:
        problem = f"a {type(model).__name__} that does not fit the GPU"
        raise ModelError(problem, "accelerate, which brings layers to GPUs", "pip install accelerate.")


def _size(model: Any) -> int:
    return sum(values.nbytes for values in model.parameters())


@contextmanager
def on_its_device(module: nn.Module, without: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Keep streamed weights of a module on its device within the context.

    Args:
        without: inner modules that are left out.
    """
    excluded = {inner for outer in without for inner in outer.modules()}
    hooks: list[tuple[nn.Module, Any]] = [
        (inner, hook)
        for inner in module.modules()
        if inner not in excluded and getattr(hook := getattr(inner, "_hf_hook", None), "offload", False)
    ]
    try:
        for inner, hook in hooks:
            hook.pre_forward(inner)
            hook.offload = False
        yield
    finally:
        for inner, hook in hooks:
            if not hook.offload:
                hook.offload = True
                hook.post_forward(inner, None)
