"""What a healing has at hand all the time: both models, what is trained, what is held out, the state that is best."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gac.core.distributed.ranks import Ranks
from gac.healing.gradients import Captures, can_be_captured
from gac.healing.logits import in_training, mean_loss, windows_at_once
from gac.healing.shards import fits, shard
from gac.healing.state import Reached, StateFile
from gac.healing.text import HealingText
from gac.healing.trainables import Trainables, Values
from gac.healing.work import Work
from gac.models.families import family_of
from gac.models.modules import input_device
from gac.plan.plan import Plan
from gac.reporting.figures.healing import LossPoint
from gac.runtime.storage.modules import count_parameters

logger = logging.getLogger(__name__)


def trainables(model: Any, plan: Plan, work: Work) -> Trainables:
    """What of a model is trained."""
    return Trainables(model, plan.weights, {one.name for one in plan.weights if work.dense or one.changed})


class Healing:
    """One healing under way. The compressed model is trained in place, and both need no gradients but for that.

    Args:
        model: the compressed one.
        dense: in the same basis.
        begun: when the clock of the work started, by ``time.monotonic``.

    Attributes:
        trained: the parameters that are.
        sizes: the root mean square of each before anything was done, by name.
        given: what they were then.
        reached: how far it has come.
        best: what they were where the loss on what is held out was least; empty where nothing was better.
        moments: of the optimiser, where an interrupted run goes on.
        looking: seconds that one look at what is held out takes.
        names: of the decoder layers, in order.
        at_once: windows whose logits are made at a time.
        captures: whether steps are captured in CUDA graphs.
    """

    reached: Reached
    given: Values
    best: Values
    moments: Values
    looking: float

    def __init__(
        self,
        model: Any,
        dense: Any,
        plan: Plan,
        text: HealingText,
        work: Work,
        state: StateFile,
        ranks: Ranks,
        begun: float,
        progress: bool,
    ) -> None:
        self.model, self.dense, self.text, self.work, self.ranks = model, dense, text, work, ranks
        self.plan, self.state, self.progress, self._begun = plan, state, progress, begun
        self.names = [f"{family_of(model.config).layers}.{at}" for at in range(model.config.num_hidden_layers)]
        self.at_once = windows_at_once(model, self.length, ranks)
        self.trained = trainables(model, plan, work)
        self.sizes = self.trained.sizes()
        self.given, self.best, self.moments = {}, {}, {}
        self.captures = Captures(can_be_captured(model, dense))
        device = input_device(model)  # which holds the masters by now, and may have room for the best ones as well
        self._near = device.type == "cuda" and fits(self.trained.count, device)

    def divide(self, mesh: DeviceMesh) -> None:
        """Leave to every process its part of both models, which are in host memory."""
        for model in (self.model, self.dense):
            shard(model, self.layers(model), mesh)
        self.trained.found_again()
        self.captures.on = self._near = False

    def resume_or_start(self) -> None:
        """Look at what is held out, and take up what a run that was stopped had reached."""
        self.given, begun = self.trained.values(), time.monotonic()
        loss = self._loss()
        self.looking = time.monotonic() - begun
        self.reached = Reached(loss, loss)
        found = self.state.read()
        reached = self.ranks.gathered(None if found is None else found[0].tokens)
        if found is not None and len({*reached}) == 1:
            self.reached, values = found
            self.trained.restore(self.trained.divided(values["now"]))
            self.best, self.moments = self.trained.divided(values.get("best", {})), values.get("moments", {})
            self._begun -= self.reached.seconds
            logger.info("healing goes on behind %d layers and %d steps", self.reached.layers, self.reached.steps)
            return
        logger.info(
            "healing %s of %s parameters on %d windows of %s, %d more held out: loss %.4f nats a token",
            f"{self.trained.count:,}",
            f"{count_parameters(self.model):,}",
            len(self.text.train),
            " and ".join(self.text.names),
            len(self.text.held),
            loss,
        )

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return int(self.text.train.shape[1])

    @property
    def left(self) -> float | None:
        """Seconds of the work, the same in every process; None where tokens are counted."""
        minutes = self.work.minutes
        return None if minutes is None else self.ranks.once(lambda: 60 * minutes - self._elapsed)

    @property
    def rate(self) -> str:
        """The learning rate, as an error names it."""
        return f" with learning_rate={self.work.learning_rate:g}"

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """The decoder layers of one of the models."""
        return [model.get_submodule(name) for name in self.names]

    def autocast(self) -> torch.autocast:
        """bfloat16 on a GPU, and of models that have 16 bits; what is trained is in float32 always."""
        return in_training(self.model)

    def look(self) -> float:
        """Measure what is held out, nats a token, and keep the values where that is the least so far."""
        loss = self._loss()
        if loss < self.reached.best:
            self.best = self.trained.values(self.best, self._near)
            self.reached = replace(self.reached, best=loss)
        return loss

    def forget(self) -> None:
        """Let go of all values, of which a GPU may hold the best."""
        self.given, self.best, self.moments = {}, {}, {}

    def point(self, phase: str, step: int, trained: float, held: float) -> None:
        """One more place of the loss curve."""
        reached = self.reached
        point = LossPoint(phase, step, reached.tokens, self._elapsed, trained, held)
        self.reached = replace(reached, curve=(*reached.curve, point), losses=())
        logger.debug("%s", point)

    def keep(self, moments: Callable[[], Iterable[tuple[str, Tensor]]], span: float = 0.0) -> None:
        """Keep the state on disk, where it is time for that.

        Args:
            moments: gives those of the optimiser, whole; all processes ask for each.
            span: what is spent of the whole model's part.
        """
        if not self.ranks.once(lambda: self.state.is_due):
            return
        whole = {"now": self.trained.gathered(), "moments": moments(), "best": self.trained.gathered(self.best)}
        held = {kind: self._at_rank_0(values) for kind, values in whole.items()}
        if self.ranks.leads:
            self.reached = replace(self.reached, seconds=self._elapsed, span=span)
            self.state.write(self.reached, held)

    def _at_rank_0(self, values: Iterable[tuple[str, Tensor]]) -> Values:
        """Such values on the host; none in other processes, which ask for each all the same."""
        return {name: one.to("cpu", copy=True) for name, one in values if self.ranks.leads}

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    def _loss(self) -> float:
        with self.autocast():
            labels = self.work.labels * self.text.held_given
            return mean_loss(self.model, self.dense, self.text.held, self.at_once, labels, self.ranks)
