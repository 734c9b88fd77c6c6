"""Models on their way to GPUs: copied through pinned memory; those that are too large for one are spread or streamed.

Streamed weights stay in host memory, and those of each module are copied to the GPU while it runs. Weights that
transformers reads from safetensors stay in the mapped file, so that all processes of a host share its pages.
"""

import importlib.util
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gac.core.errors import ModelError
from gac.models.modules import free_memory

logger = logging.getLogger(__name__)

SHARE = 0.6  # share of a GPU's free memory for weights: moments, hidden states and decompositions need the rest
FULL = 0.9  # share above which a model is too large for one GPU
LARGE = 1 << 16  # bytes from which a weight goes through pinned memory
CHUNK = 32 << 20  # bytes of each of two pinned buffers: one is filled while the other is sent
_cuda: Any = torch.cuda  # whose events have no annotations


def placed(model: Any, device: torch.device) -> Any:
    """The model on a device, or streamed to it where it is too large; a ModelError if accelerate is then missing."""
    size = _size(model)
    if device.type != "cuda" or size <= SHARE * free_memory(device):
        return moved(model, device)
    logger.info("weights of %.0f GB stay in host memory; each layer comes to %s as it runs", size / 1e9, device)
    return streamed(model, device)


def spread(model: Any, device: torch.device) -> Any:
    """The model on a device, or whole layers of it on each GPU of this host where it is too large for one.

    No other GPU is taken where ``device`` names one by number. A ModelError says if all GPUs together have too little
    room, or if accelerate is not installed.
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
    """A model in host memory whose modules run on a device, each with its weights there for as long."""
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
    """Keep streamed weights of a module on its device within the context, except those of modules in ``without``."""
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


def moved(model: Any, device: torch.device | str) -> Any:
    """The model on a device, like ``model.to(device)``, which reads a mapped file with one slow thread."""
    place = torch.device(device)
    if place.type == "cuda" and (large := _large(model)):
        for values, copy in zip(large, _sent(large, place), strict=True):
            values.data = copy
    return model.to(place)


def _large(model: nn.Module) -> list[Tensor]:
    tensors = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}.values()
    plain = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided]
    return [
        values for values in plain if values.device.type == "cpu" and values.nbytes >= LARGE and values.is_contiguous()
    ]


def _sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    targets = [torch.empty(source.shape, dtype=source.dtype, device=device) for source in tensors]
    with torch.cuda.device(device), torch.no_grad():
        stages = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        done = [_cuda.Event() for _ in stages]
        for turn, (pieces, places) in enumerate(_batches(zip(tensors, targets, strict=True))):
            stage, event = stages[turn % 2], done[turn % 2]
            event.synchronize()
            sizes = [len(piece) for piece in pieces]
            staged = torch.split_with_sizes(stage[: sum(sizes)], sizes)
            torch._foreach_copy_(staged, pieces)
            torch._foreach_copy_(places, staged, non_blocking=True)
            event.record()
        torch.cuda.synchronize()
    return targets


def _batches(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    room = CHUNK
    for source, target in pairs:
        for piece, place in zip(_pieces(source), _pieces(target), strict=True):
            if len(piece) > room:
                yield sources, targets
                sources, targets, room = [], [], CHUNK
            sources.append(piece)
            targets.append(place)
            room -= len(piece)
    if sources:
        yield sources, targets


def _pieces(values: Tensor) -> Sequence[Tensor]:
    return torch.split(values.detach().reshape(-1).view(torch.uint8), CHUNK)
