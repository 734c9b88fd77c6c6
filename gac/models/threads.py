"""What threads of one process must not do at the same time."""

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
    """Let a function have the models that it is given, alone or in a list, to itself while it runs; with PyTorch's own
    settings, see ``standard_settings``.

    To measure a model is to change it for a while (hooks, gradients, its mode), so a second thread would measure
    something else. It is refused and does not wait: after ``compress`` it would get another model than it asked for.

    Raises:
        ModelError: by the function, where another thread has one of the models in such a call.
    """

    @wraps(call)
    def alone(*args: P.args, **options: P.kwargs) -> R:
        with standard_settings(), ExitStack() as held:
            for given in (*args, *options.values()):
                for model in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(model, nn.Module):
                        held.enter_context(_held(model, call.__name__))
            return call(*args, **options)

    return alone


@contextmanager
def _held(model: nn.Module, doing: str) -> Iterator[None]:
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
