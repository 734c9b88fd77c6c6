"""The whole model trained, step by step, with the loss of ``gac.healing.logits``."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from gac.core.progress import progress_bar
from gac.healing.descent import COOLING, Descent, cooled, scheduled
from gac.healing.gradients import Gradients
from gac.healing.healing import Healing
from gac.healing.logits import recomputing, summed_loss
from gac.healing.trainables import learning
from gac.healing.work import Span, rate_of_steps
from gac.reporting.figures.healing import LossPoint
from gac.runtime.storage.modules import count_parameters

logger = logging.getLogger(__name__)

BATCH = 16_384
"""Tokens of a step, in whole windows."""
STEPS = 64
"""Steps that there are at least, by smaller batches."""
LOOKS = 20
"""How often at most what is held out is looked at."""
LOOKED = 0.3
"""Windows held out that are looked at for one that is trained on, at most."""
LABELLED = 0.85
"""The text's own tokens are learned once this part of the work is done: a few turns of a small text do not make it
known by heart."""
PATIENCE = 4
"""How many looks show that a text is overfitted; as many follow while the rate falls."""


def heal_whole(healing: Healing) -> None:
    """Train until the work is done. Where the text is overfitted, that is soon: the rate then falls to its end.

    Raises:
        HealingError: a loss or a gradient is not finite; the step is not taken.
    """
    params, layers = count_parameters(healing.model), healing.layers(healing.model)
    with recomputing(healing.model, layers, params), learning(healing.trained.parameters):
        work, spent = healing.work, healing.reached.span
        tokens = None if work.tokens is None else work.tokens - int(work.blocks * work.tokens)
        seconds = _seconds_left(healing)
        if (tokens or 0) <= 0 and (seconds or 0) <= 0:
            return
        steps = _Steps(healing, seconds, tokens)
        seconds = _seconds_left(healing)  # timing took some
        steps.run(Span(healing.ranks, None if seconds is None else seconds + spent, tokens, spent))


def overfitted(curve: Sequence[LossPoint]) -> bool:
    """Whether what is trained on was better than ever at ``PATIENCE`` looks since what is held out was best.

    Steps that are merely too large for the moment make neither better.
    """
    looks = [one for one in curve if one.phase == "model"]
    best = min(range(len(looks)), key=lambda at: looks[at].held if isfinite(looks[at].held) else inf, default=0)
    since = range(best + 1, len(looks))
    return sum(looks[at].trained < min(one.trained for one in looks[:at]) for at in since) >= PATIENCE


def _seconds_left(healing: Healing) -> float | None:
    """For steps: looks come at the end, and after it; None where tokens are counted."""
    left = healing.left
    return None if left is None else left - 3 * healing.looking


class _Steps:
    """Steps of the whole model: how large they are, and how often what is held out is looked at.

    Args:
        seconds: that are left; None where ``tokens`` are counted.
    """

    def __init__(self, healing: Healing, seconds: float | None, tokens: int | None) -> None:
        self._healing, count = healing, healing.ranks.count
        self._gradients = self._none_yet()
        if seconds is None:
            fits = (tokens or 0) // healing.length
        else:
            taken = self._seconds_of_a_window()
            each = healing.ranks.once(lambda: taken)
            fits = int(seconds / each) * count
            logger.info("about %s tokens a second", f"{healing.length * count / each:,.0f}")
        self._windows = max(1, min(max(1, BATCH // healing.length), fits // STEPS) // count) * count
        self._looks = min(LOOKS, max(PATIENCE, int(LOOKED * fits / len(healing.text.held))))
        logger.info("the whole model: about %d steps of %d windows", max(1, fits // self._windows), self._windows)

    def run(self, span: Span) -> None:
        """Train for so long."""
        healing, read = self._healing, self._windows * self._healing.length
        rate = rate_of_steps(healing.work.learning_rate, read, BATCH)
        descent = Descent(healing.trained.parameters, healing.sizes, rate, healing.ranks)
        progress = span.progress()
        if healing.moments:
            descent.restore(healing.moments)
            healing.moments = {}
        looked, begun, first = self._turn(progress), time.monotonic(), healing.reached.steps
        with progress_bar("healing", "step", shown=healing.progress) as bar:
            while progress < 1 and not self._cool(progress):
                where = f"step {healing.reached.steps + 1} of the whole model{healing.rate}"
                loss = self._add_gradients(self._next(), self._labels(progress))
                value = descent.step(loss, self._part(progress), where)
                span.read(read)
                self._count(read, value)
                progress = span.progress()
                speed = (healing.reached.steps - first) * read / (time.monotonic() - begun)
                _say(bar, value, healing.reached.steps, progress, speed)
                if self._turn(progress) > looked:
                    losses = healing.reached.losses
                    held = healing.look()
                    healing.point("model", healing.reached.steps, mean(losses), held)
                    self._turn_back(progress)
                looked = self._turn(progress)
                healing.keep(descent.state, span.spent)

    def _part(self, progress: float) -> float:
        """Of the highest rate, where so much of the work is done."""
        begun = self._healing.reached.cooling
        return scheduled(progress) if begun is None else cooled(progress, begun)

    def _labels(self, progress: float) -> float:
        """The part of the loss on given text that is its own next tokens, where so much of the work is done."""
        late = progress >= LABELLED or self._healing.reached.cooling is not None
        return self._healing.work.labels if late else 0.0

    def _turn(self, progress: float) -> int:
        """How often what is held out is to be looked at by then, since the rate began to fall early where it did."""
        begun = self._healing.reached.cooling
        if begun is None or progress >= 1:
            return int(progress * self._looks) if begun is None else PATIENCE
        return int(min(1.0, (progress - begun) / COOLING) * PATIENCE)

    def _cool(self, progress: float) -> bool:
        """Whether the rate has fallen to its end early."""
        return self._healing.reached.cooling is not None and self._turn(progress) >= PATIENCE

    def _turn_back(self, progress: float) -> None:
        """Go back to the best state, and let the rate fall from now on, where the text is overfitted."""
        healing, reached = self._healing, self._healing.reached
        if reached.cooling is None and overfitted(reached.curve):
            logger.info("the text is overfitted: back to the state with the least held-out loss, and to smaller steps")
            healing.trained.restore(healing.best or healing.given)
            healing.reached = replace(reached, cooling=progress)

    def _count(self, read: int, loss: float) -> None:
        reached = self._healing.reached
        self._healing.reached = replace(
            reached, steps=reached.steps + 1, tokens=reached.tokens + read, losses=(*reached.losses, loss)
        )

    def _next(self) -> Tensor:
        """Which windows come next: this process's share of them."""
        healing = self._healing
        batch = healing.text.drawn(healing.reached.steps * self._windows, self._windows, healing.work.seed)
        return batch[healing.ranks.own :: healing.ranks.count]

    def _none_yet(self) -> Gradients:
        healing = self._healing
        loss = partial(_part_of_loss, healing)  # a method of these steps would keep them, and all they hold, alive
        return Gradients(loss, healing.trained.parameters.values(), healing.captures, healing.ranks)

    def _add_gradients(self, which: Tensor, labels: float = 0.0, average: bool = True) -> Tensor:
        """Those of the mean loss over windows that are trained on, which is returned.

        Args:
            average: over all processes.
        """
        text, tokens = self._healing.text, torch.tensor(len(which) * self._healing.length)
        parts = torch.tensor_split(which, -(-len(which) // self._healing.at_once))
        self._gradients.begin()
        given = [(text.train[part], labels * text.given[part], tokens) for part in parts]
        losses = [self._gradients.add(*one, last=average and one is given[-1]) for one in given]
        return torch.stack(losses).sum()

    def _seconds_of_a_window(self) -> float:
        """Of training: the second of two runs, for the first one also sets up what it needs."""
        healing = self._healing
        count = max(1, BATCH // healing.length) if healing.captures.on else healing.at_once
        part = torch.arange(min(count, len(healing.text.train)))
        for _ in range(2):
            begun = time.monotonic()
            float(self._add_gradients(part, average=False))  # averaging adds little
        seconds = time.monotonic() - begun
        for one in healing.trained.parameters.values():
            one.grad = None
        self._gradients = self._none_yet()  # steps may be smaller, and what was captured would keep its memory
        return seconds / len(part)


def _part_of_loss(healing: Healing, windows: Tensor, labels: Tensor, tokens: Tensor) -> Tensor:
    """What these windows have of the mean loss of a batch of so many tokens."""
    with healing.autocast():
        return summed_loss(healing.model, healing.dense, windows, labels) / tokens


def _say(bar: Any, loss: float, steps: int, progress: float, speed: float) -> None:
    """How far it is, and how many steps there will be as it goes."""
    bar.total = max(steps, round(steps / max(progress, 1e-9)))
    bar.set_description(f"healing, loss {loss:.4f}, {speed:,.0f} tokens a second", refresh=False)
    bar.update(steps - bar.n)
