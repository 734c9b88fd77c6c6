"""Calls into solvers that Ctrl-C can leave: while their C++ runs, Python hears no signal in the same thread."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def interruptible(call: Callable[[], T], stop: Callable[[], None] = lambda: None) -> T:
    """The result of a call, which runs in a thread of its own.

    Args:
        stop: ends the call, after a KeyboardInterrupt; without it, the call runs on unheard until it ends.
    """
    result = Future[T]()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as failure:  # noqa: BLE001  # it is raised where it is waited for
            result.set_exception(failure)

    Thread(target=run, daemon=True).start()
    try:
        return result.result()
    except KeyboardInterrupt:
        stop()
        raise
