"""Triton kernels on a CPU, in Triton's interpreter (``tests/fixtures.py``); on a GPU they are compiled."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, library

from gac.runtime.kernels import gpu
from gac.runtime.kernels import split_k as tiles
from gac.runtime.plain.modeling_gac import Heads

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILER = "inductor" if DEVICE == "cuda" else "aot_eager"
"""Backend of ``torch.compile``: on a CPU Inductor calls a C++ compiler, which takes most of a minute."""


class OnGpu:
    """A tensor that says that it is on a GPU."""

    is_cuda = True


class Graphs(list[torch.fx.GraphModule]):
    """A backend of ``torch.compile`` that keeps graphs, and runs them as they are."""

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.append(graph)
        return graph.forward


class Hopper:
    """The properties of a GPU that kernels ask for."""

    name, major, minor, shared_memory_per_multiprocessor = "a GPU", 9, 0, 2**17


def shapes(every: Sequence[Any], interpreted: Sequence[int]) -> list[Any]:
    """Return all cases of a kernel on a GPU, and some by their positions in Triton's interpreter, which is slow."""
    return list(every) if DEVICE == "cuda" else [every[position] for position in interpreted]


def features(y: Any) -> Tensor:
    """The output of a module, of shorter values too."""
    return y.features if isinstance(y, Heads) else y  # type: ignore[no-any-return]


def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of small weights are shared by some programs, with little shared memory, on every device."""
    monkeypatch.setattr(gpu, "processors", lambda device: 2)
    monkeypatch.setattr(tiles, "_shared_memory", lambda device: 2**16)


@contextmanager
def operators(*run: Any, **replaced: Any) -> Iterator[None]:
    """Run GAC's operators on a CPU as on a GPU, or other functions under their names."""
    if DEVICE == "cuda":
        yield
        return
    added = library.Library("gac", "IMPL")
    for name, function in ({each.__name__: each.__wrapped__ for each in run} | replaced).items():
        added.impl(name, function, "CPU")
    try:
        yield
    finally:
        added._destroy()
