"""The course of a healing: layers by themselves, then the whole model; the model ends in its best state."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from gac.core.errors import HealingError
from gac.healing.attention import of_windows
from gac.healing.healing import Healing, trainables
from gac.healing.launches import in_one_launch
from gac.healing.layers import heal_layers
from gac.healing.repeatable import repeatable
from gac.healing.shards import waiting
from gac.healing.whole import heal_whole
from gac.reporting.figures.healing import LossPoint


@dataclass(frozen=True, eq=False)
class Ended:
    """How a healing ended.

    Attributes:
        start: the loss on what is held out before, nats a token.
        best: the least since.
        tokens: read in training.
        curve: what was measured.
        failure: what stopped it, where something did.
    """

    start: float
    best: float
    tokens: int
    curve: tuple[LossPoint, ...]
    failure: HealingError | None = None

    @property
    def won(self) -> bool:
        """Whether the model is better than it was."""
        return self.best < self.start


def run(healing: Healing) -> Ended:
    """Train; the model is then in its best state, in its own dtype and storages, and as it was where this raises."""
    kept = False
    try:
        ended = trained(healing)
        kept = ended.won
    finally:
        healing.trained.restore(healing.best if kept else healing.given)
        healing.forget()
        healing.trained.close(changed=kept)
    return ended


def run_in_parts(healing: Callable[..., Healing], model: Any, dense: Any) -> Ended:
    """The same where every process holds a part of copies of both models, which wait in host memory meanwhile.

    Args:
        healing: of a ``model`` and a ``dense`` one.
    """
    device = model.device
    with waiting(model, dense):
        parts = healing(model=deepcopy(model), dense=deepcopy(dense))
        parts.divide(parts.ranks.mesh(device.type))
        ended = trained(parts)
        if ended.won:
            own = trainables(model, parts.plan, parts.work)
            for name, value in parts.trained.gathered(parts.best):
                own.restore({name: value})
        del parts  # which makes room for the whole models
    if ended.won:
        own.close(changed=True)
    return ended


def trained(healing: Healing) -> Ended:
    """Train; nothing is said of the state that the model is in then."""
    models = healing.model, healing.dense
    with repeatable(healing.model.device), in_one_launch(*models), of_windows(*models):
        return _ended(healing)


def _ended(healing: Healing) -> Ended:
    failure = None
    healing.resume_or_start()
    try:
        heal_layers(healing)
        heal_whole(healing)
    except HealingError as stopped:
        failure = stopped
    found = healing.reached
    return Ended(found.start, found.best, found.tokens, found.curve, failure)
