"""Locks between threads of one process."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import Lock, RLock
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from gac.core.errors import ModelError
from gac.models.settings import standard_settings

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
