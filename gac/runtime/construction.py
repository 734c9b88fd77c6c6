"""What makes loading a model faster: no garbage collection, no initial values."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave the garbage collector off: it would walk everything that Python has loaded, and all that is new stays.

    So that it does not walk all of that at once when it is on again, what is new is counted among what is old: frozen
    and released, which moves lists and looks at no object. Not where somebody keeps objects frozen, which stay so.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextmanager
def uninitialised() -> Iterator[None]:
    """Leave out the initialisation of linear weights on the meta device: they have no values, and it takes its time.

    Whatever other threads build meanwhile is not on that device, or has no values either.
    """
    initialise = nn.Linear.reset_parameters

    def reset_parameters(self: nn.Linear) -> None:
        if not self.weight.is_meta:
            initialise(self)

    nn.Linear.reset_parameters = reset_parameters  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Linear.reset_parameters = initialise  # type: ignore[method-assign]
