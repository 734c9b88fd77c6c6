"""Entry points: exclusive use of models and of PyTorch's settings by one thread at a time."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import wraps
from threading import Lock, RLock
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.amp.autocast_mode import is_autocast_available

from gac.core.arguments import check_arguments
from gac.core.distributed import launch
from gac.core.distributed.run import on_every_rank
from gac.core.errors import ModelError

P = ParamSpec("P")
R = TypeVar("R")

LOADING = RLock()
"""Held while transformers loads: it changes torch's defaults and its own settings, which all threads share."""

_IN_USE: "WeakKeyDictionary[nn.Module, RLock]" = WeakKeyDictionary()
_LOOKING = Lock()


def entry_point(every_rank: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a public function that uses models: arguments are checked (``check_arguments``), each model is its alone.

    Measuring a model changes it for a while (hooks, gradients, its mode), so a second thread would measure something
    else. It gets a ModelError and does not wait: after ``compress`` the model is another one. PyTorch has its initial
    settings (``standard_settings``).

    Args:
        every_rank: all processes of a run call the function at once, see ``gac.core.distributed.run.on_every_rank``.
    """

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        @wraps(call)
        def entered(*args: P.args, **options: P.kwargs) -> R:
            bound = check_arguments(call, args, options)
            joining = on_every_rank(call.__name__) if every_rank and launch.processes() > 1 else nullcontext()
            with joining, standard_settings(), ExitStack() as locks:
                for value in (*bound.args, *bound.kwargs.values()):
                    for model in value if isinstance(value, (list, tuple)) else (value,):
                        if isinstance(model, nn.Module):
                            locks.callback(_lock(model, call.__name__).release)
                return call(*bound.args, **bound.kwargs)

        return entered

    return decorate


def _lock(model: nn.Module, verb: str) -> RLock:
    with _LOOKING:
        lock = _IN_USE.setdefault(model, RLock())
    if not lock.acquire(blocking=False):
        raise ModelError(
            f"gac.{verb} of a {type(model).__name__} that another thread is using",
            "a model that one call at a time works on",
            "Wait for the other call, or give each thread a model of its own (copy.deepcopy).",
        )
    return lock


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
        self._lock, self._threads, self._restore = Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._threads += 1
            if self._threads == 1:
                _use_standards(self._restore)

    def __exit__(self, *_failure: object) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                self._restore.close()


_PROCESS = _ProcessSettings()


def _use_standards(restore: ExitStack) -> None:
    # What is restored first is added last: a backend's own precision differs from the one for all.
    mkldnn: Any = torch.backends.mkldnn
    for backend in (torch.backends.cuda.matmul, mkldnn.matmul):
        restore.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
    with suppress(RuntimeError):  # where it was set for a backend alone
        restore.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("highest")
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    before = torch.are_deterministic_algorithms_enabled()
    restore.callback(torch.use_deterministic_algorithms, before, warn_only=warn_only)
    torch.use_deterministic_algorithms(False)
