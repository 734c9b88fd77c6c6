"""Every decoder layer trained by itself, in order: ``gac.healing.blocks`` says towards what."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean

import torch
from torch import Tensor, nn

from gac.core.progress import progress_bar
from gac.healing.blocks import LayerSteps, Passage, on_host, relative_error
from gac.healing.descent import Descent
from gac.healing.healing import Healing
from gac.healing.trainables import learning, values_of
from gac.healing.work import Span, rate_of_steps

logger = logging.getLogger(__name__)

BATCH = 4096
"""Tokens of a step, in whole windows."""
STEPS = 8
"""Steps of a layer that there are at least, by smaller batches."""
PASSING = 0.25
"""The most of the time in which states are taken through the layers."""


def heal_layers(healing: Healing) -> None:
    """Train those layers that are not trained yet; where the whole model is worse for it, it is as it was given.

    Raises:
        HealingError: a loss is not finite.
    """
    work, left = healing.work, healing.left
    seconds = None if left is None else work.blocks * left
    if healing.reached.layers < len(healing.names) and work.blocks and (seconds is None or seconds > 0):
        _train(healing, seconds)
        loss = healing.look()
        if loss > healing.reached.start:
            logger.warning(
                "layers by themselves took the loss held out from %.4f to %.4f nats a token: the model begins anew",
                *(healing.reached.start, loss),
            )
            healing.trained.restore(healing.given)
        healing.keep(tuple)
    healing.reached = replace(healing.reached, layers=len(healing.names))


def _train(healing: Healing, seconds: float | None) -> None:
    """Take the states of both models through all layers, and train each on the way."""
    parts, held = _batches(healing, seconds)
    waits = on_host(healing.dense, sum(one.numel() for one in (*parts, *held)))
    with healing.autocast():  # what is trained has another dtype than the rest
        dense, ours = (
            Passage(model, healing.layers(model), [*parts, *held], waits) for model in (healing.dense, healing.model)
        )
    begun, count = time.monotonic(), len(healing.names)
    bar = progress_bar("healing layers", "layer", total=count, shown=healing.progress)
    with bar, healing.autocast():
        for layer in range(count):
            dense.advance(layer)
            if layer >= healing.reached.layers:
                share = None if seconds is None else (seconds - (time.monotonic() - begun)) / (count - layer)
                _Layer(healing, layer, ours, dense.states, len(parts)).run(share)
            ours.advance(layer)
            bar.update()


def _batches(healing: Healing, seconds: float | None) -> tuple[list[Tensor], list[Tensor]]:
    """The windows that layers learn from, in batches of this process, and what is held out."""
    text, held, count = healing.text, healing.text.held, healing.ranks.count
    if seconds is None:
        windows = int(healing.work.blocks * (healing.work.tokens or 0)) // healing.length
    else:
        fits = PASSING * seconds * len(held) / max(healing.looking, 1e-9)
        windows = healing.ranks.once(lambda: int(fits))
    most = len(text.read)
    windows = max(min(windows, most), min(STEPS * count, most))
    size = max(1, min(BATCH // healing.length, windows // (STEPS * count)))
    mine = text.train[text.drawn(0, windows, healing.work.seed)][healing.ranks.rank :: count][: windows // count]
    return [*torch.split(mine, size)], [*torch.split(held, size)]


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer being trained, on the first parts of the states; what is held out is in the others.

    Attributes:
        ours: the compressed model's states at its input.
        due: the dense model's at its output.
    """

    healing: Healing
    layer: int
    ours: Passage
    due: Sequence[Tensor]
    parts: int

    def run(self, seconds: float | None) -> None:
        """Train it for so long, or on as many tokens as the work says; as it was before where that is no better."""
        healing, own = self.healing, self.healing.trained.within(self.healing.names[self.layer])
        before = after = self._error()
        read = 0
        if own and before > 0:
            given = values_of(own)
            read = self._train(own, seconds)
            if not (after := self._error()) < before:
                healing.trained.restore(given)
        reached = healing.reached
        healing.reached = replace(reached, layers=self.layer + 1, tokens=reached.tokens + read // len(healing.names))
        healing.point("blocks", self.layer, before, min(after, before))
        if healing.reached.layers < len(healing.names):  # the last one's is kept once all have been looked at
            healing.keep(tuple)

    def _train(self, own: dict[str, nn.Parameter], seconds: float | None) -> int:
        """Returns the tokens that were read."""
        work, ranks = self.healing.work, self.healing.ranks
        tokens = None if work.tokens is None else int(work.blocks * work.tokens)
        span = Span(ranks, seconds, tokens)
        rate = rate_of_steps(work.learning_rate, self.ours.states[0].shape[:2].numel(), BATCH)
        descent = Descent(own, self.healing.sizes, rate, ranks)
        pairs = [*zip(self.ours.states[: self.parts], self.due[: self.parts], strict=True)]
        run, seed = partial(self.ours.run, self.layer), work.seed + 1 + self.layer
        steps = LayerSteps(run, pairs, seed, ranks, self.healing.captures)
        with learning(own):
            return steps.run(descent, span, f"layer {self.layer}{self.healing.rate}")

    @torch.no_grad()
    def _error(self) -> float:
        """The relative error of its output on what is held out."""
        pairs = zip(self.ours.states[self.parts :], self.due[self.parts :], strict=True)
        found = mean(float(relative_error(self.ours.run(self.layer, state), due)) for state, due in pairs)
        return self.healing.ranks.once(lambda: found)
