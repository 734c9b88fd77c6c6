"""Triton kernels on a CPU, in Triton's interpreter (``conftest.py``); on a GPU they are compiled."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import library

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def operators(**by_name: Any) -> Iterator[None]:
    """GAC's operators by what they run on a GPU, on a CPU too."""
    if DEVICE == "cuda":
        yield
        return
    added = library.Library("gac", "IMPL")
    for name, function in by_name.items():
        added.impl(name, function, "CPU")
    try:
        yield
    finally:
        added._destroy()
