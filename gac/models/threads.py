"""Exclusive use of models and of PyTorch's settings by one thread at a time."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import Lock, RLock
from types import TracebackType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.amp.autocast_mode import is_autocast_available

from gac.core.errors import ModelError

P = ParamSpec("P")
R = TypeVar("R")

LOADING = RLock()
"""Held while transformers loads: it changes torch's defaults and its own settings, which all threads share."""

_IN_USE: "WeakKeyDictionary[nn.Module, RLock]" = WeakKeyDictionary()
_LOOKING = Lock()


def one_call_at_a_time(call: Callable[P, R]) -> Callable[P, R]:
    """Give a function exclusive use of models among its arguments, and PyTorch's own settings (``standard_settings``).

    Measuring a model changes it for a while (hooks, gradients, its mode), so a second thread would measure something
    else. It is refused and does not wait: after ``compress`` the model is another one.

    Raises:
        ModelError: by the function, where another thread has one of the models in such a call.
    """

    @wraps(call)
    def locked(*args: P.args, **options: P.kwargs) -> R:
        with standard_settings(), ExitStack() as locks:
            for value in (*args, *options.values()):
                for model in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(model, nn.Module):
                        locks.enter_context(_locked(model, call.__name__))
            return call(*args, **options)

    return locked


@contextmanager
def _locked(model: nn.Module, doing: str) -> Iterator[None]:
    with _LOOKING:
        lock = _IN_USE.setdefault(model, RLock())
    if not lock.acquire(blocking=False):
        raise ModelError(
            f"gac.{doing} of a {type(model).__name__} that another thread is using",
            "a model that one call at a time works on",
            "Wait for the other call, or give each thread a model of its own (copy.deepcopy).",
        )
    try:
        yield
    finally:
        lock.release()


@contextmanager
def standard_settings() -> Iterator[None]:
    """Use PyTorch's initial settings, so that no setting of the caller changes a result; restored on exit.

    Autocast, inference mode, the lack of gradients and the default device belong to the thread. The precision of
    float32 products and deterministic algorithms belong to the process. The default dtype stays: transformers changes
    it in any thread while it loads, so GAC names that of each tensor.
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
    """Settings that all threads share: the first to enter changes them, the last to leave restores them."""

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
