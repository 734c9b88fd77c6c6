"""PyTorch's settings while GAC runs a model: those that PyTorch starts with, whatever the caller has set."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from types import TracebackType
from typing import Any

import torch
from torch.amp.autocast_mode import is_autocast_available


@contextmanager
def standard_settings() -> Iterator[None]:
    """With no setting of the caller that changes figures, all of which are kept on disk or printed; as it was on exit.

    Autocast, inference mode, the lack of gradients and the default device belong to the thread. The precision of
    float32 products and deterministic algorithms, for which PyTorch has no kernel in places, belong to the process.
    The default dtype stays: transformers changes it in any thread while it loads, so GAC names that of each tensor.
    """
    with ExitStack() as stack:
        stack.enter_context(_PROCESS)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


class _ProcessSettings:
    """Settings that all threads share: the first of them to enter changes them, the last to leave restores them."""

    def __init__(self) -> None:
        self._lock, self._threads = Lock(), 0
        self._restored: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._threads += 1
            if self._threads == 1:
                self._restored = [_full_precision(), _any_algorithm()]

    def __exit__(self, *_failure: type[BaseException] | BaseException | TracebackType | None) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                for restore in self._restored:
                    restore()


_PROCESS = _ProcessSettings()


def _full_precision() -> Callable[[], None]:
    mkldnn: Any = torch.backends.mkldnn
    backends = (torch.backends.cuda.matmul, mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # set for a backend alone
        precision = None
    torch.set_float32_matmul_precision("highest")

    def restore() -> None:
        if precision is not None:
            torch.set_float32_matmul_precision(precision)
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value

    return restore


def _any_algorithm() -> Callable[[], None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    return lambda: torch.use_deterministic_algorithms(before[0], warn_only=before[1])
