"""Fixtures for kernels and compiled models."""

from collections.abc import Iterator

import pytest
import torch

import gac.runtime.storage.base


@pytest.fixture
def kernels_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of weights in storages run wherever tensors are, on inputs of 16 bits."""
    monkeypatch.setattr(gac.runtime.storage.base, "unsupported_reason", lambda device, dtype: None)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
