"""Kernels that add in the same order every time, so that the same seed gives the same bits."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """With such kernels on a GPU, where PyTorch has them; those of a CPU are."""
    if device.type != "cuda":
        yield
        return
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        with deterministic(warn_only=True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


@contextmanager
def deterministic(warn_only: bool) -> Iterator[None]:
    """With PyTorch's deterministic algorithms asked for; as it was on exit.

    Args:
        warn_only: whether what has none runs all the same; else it is an error.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
