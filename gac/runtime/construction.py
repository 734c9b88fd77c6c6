"""What makes loading a model faster: no garbage collection, no initial values."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave the garbage collector off: it would walk every object of the process, and all new objects stay anyway.

    Afterwards new objects are moved to the oldest generation, by freezing and unfreezing, so that the collector does
    not walk all of them at once. This is left out where somebody keeps objects frozen, which stay frozen.
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
    """Leave out the initialisation of linear weights on the meta device: they have no values, and it takes time.

    Other threads are not disturbed: weights that are not on that device are initialised as always.
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
