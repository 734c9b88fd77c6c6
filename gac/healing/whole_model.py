"""Training of the whole model, with the loss of ``gac.healing.losses``."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from statistics import mean

import torch
from torch import Tensor

from gac.core.progress import progress_bar
from gac.healing.gradients import Gradients
from gac.healing.losses import gradient_checkpointing, summed_loss
from gac.healing.optimizer import COOLING, RelativeAdamW, Span, cooling_schedule, rate_for_batch, schedule
from gac.healing.records import LossPoint
from gac.healing.run import DistillationRun
from gac.healing.trainables import gradients_of
from gac.models.modules import training_autocast

logger = logging.getLogger(__name__)

BATCH = 16_384  # tokens of a step, in full windows
STEPS = 64  # the minimum number of steps; batches get smaller to allow it
EVALUATIONS = 20  # the largest number of held-out evaluations
EVALUATED = 0.3  # the largest number of held-out windows that are evaluated per training window
LABELS_START = 0.85  # share of the work before labels are used, so that a few epochs of a small text do not memorise it
PATIENCE = 4  # evaluations that show overfitting; as many follow while the rate falls


def train_whole_model(run: DistillationRun) -> None:
    """Train until the budget is spent. If the text is overfitted, the rate falls to its end early."""
    layers = run.layers(run.model)
    with gradient_checkpointing(run.model, layers), gradients_of(run.trainables.parameters):
        budget, spent = run.budget, run.progress.spent
        tokens = None if budget.tokens is None else budget.tokens - int(budget.blocks * budget.tokens)
        seconds = _seconds_for_steps(run)
        if (tokens or 0) <= 0 and (seconds or 0) <= 0:
            return
        steps = _Steps(run, seconds, tokens)
        seconds = _seconds_for_steps(run)  # less the timing of a step
        steps.take(Span(run.ranks, None if seconds is None else seconds + spent, tokens, spent))


def is_overfitted(curve: Sequence[LossPoint]) -> bool:
    """True if the training loss had a new minimum at ``PATIENCE`` evaluations after the best held-out loss.

    Steps that are merely too large improve neither.
    """
    points = [point for point in curve if point.phase == "model"]
    heldout = [point.heldout_loss if isfinite(point.heldout_loss) else inf for point in points]
    best = min(range(len(points)), key=heldout.__getitem__, default=0)
    later = range(best + 1, len(points))
    return sum(points[i].train_loss < min(before.train_loss for before in points[:i]) for i in later) >= PATIENCE


def _seconds_for_steps(run: DistillationRun) -> float | None:
    left = run.seconds_left
    return None if left is None else left - 3 * run.evaluation_seconds


class _Steps:
    """Steps of the whole model, with the batch size and evaluation interval for the seconds left, or the tokens."""

    def __init__(self, run: DistillationRun, seconds: float | None, tokens: int | None) -> None:
        self._run, ranks = run, run.ranks
        self._gradients = self._new_gradients()
        if seconds is None:
            affordable = (tokens or 0) // run.length
        else:
            measured = self._seconds_per_window()
            per_window = ranks.once(lambda: measured)
            affordable = int(seconds / per_window) * ranks.count
            logger.info("about %s tokens a second", f"{run.length * ranks.count / per_window:,.0f}")
        per_rank = max(1, min(max(1, BATCH // run.length), affordable // STEPS) // ranks.count)
        self._windows = per_rank * ranks.count
        self._evaluations = min(EVALUATIONS, max(PATIENCE, int(EVALUATED * affordable / len(run.text.heldout))))
        steps = max(1, affordable // self._windows)
        logger.info("the whole model: about %d steps of %d windows", steps, self._windows)

    def take(self, span: Span) -> None:
        """Take steps until the span is over, or until the rate has fallen early."""
        run, batch, labels = self._run, self._windows * self._run.length, self._run.budget.labels
        rate_text = f" with learning_rate={run.budget.learning_rate:g}"
        rate = rate_for_batch(run.budget.learning_rate, batch, BATCH)
        optimizer = RelativeAdamW(run.trainables.parameters, run.rms, rate, run.ranks)
        progress = span.progress()
        if run.optimizer_state:
            optimizer.restore(run.optimizer_state)
            run.optimizer_state = {}
        evaluated, start, first = self._due_evaluations(progress), time.monotonic(), run.progress.steps
        with progress_bar("healing", "step", shown=run.show_progress) as bar:
            while progress < 1 and (run.progress.cooling_start is None or evaluated < PATIENCE):
                step, cooling = run.progress.steps + 1, run.progress.cooling_start
                indices = run.text.batch((step - 1) * self._windows, self._windows, run.budget.seed)
                late = progress >= LABELS_START or cooling is not None
                loss = self._add_gradients(indices[run.ranks.rank :: run.ranks.count], labels if late else 0.0)
                scale = schedule(progress) if cooling is None else cooling_schedule(progress, cooling)
                value = optimizer.step(loss, scale, f"step {step} of the whole model{rate_text}")
                span.add(batch)
                losses = (*run.progress.recent_losses, value)
                tokens = run.progress.tokens + batch
                run.progress = replace(run.progress, steps=step, tokens=tokens, recent_losses=losses)
                progress = span.progress()
                speed = (step - first) * batch / (time.monotonic() - start)
                bar.total = max(step, round(step / max(progress, 1e-9)))
                bar.set_description(f"healing, loss {value:.4f}, {speed:,.0f} tokens a second", refresh=False)
                bar.update(step - bar.n)
                if self._due_evaluations(progress) > evaluated:
                    heldout_loss = run.evaluate_heldout()
                    run.record_loss("model", step, mean(losses), heldout_loss)
                    self._restore_best_if_overfitted(progress)
                evaluated = self._due_evaluations(progress)
                run.checkpoint(optimizer.state, span.spent)

    def _due_evaluations(self, progress: float) -> int:
        """The number of evaluations due by then; while the rate falls early, counted from the start of that."""
        start = self._run.progress.cooling_start
        if start is None or progress >= 1:
            return int(progress * self._evaluations) if start is None else PATIENCE
        return int(min(1.0, (progress - start) / COOLING) * PATIENCE)

    def _restore_best_if_overfitted(self, progress: float) -> None:
        run = self._run
        if run.progress.cooling_start is None and is_overfitted(run.progress.curve):
            logger.info("the text is overfitted: restoring the best snapshot, and taking smaller steps")
            run.trainables.restore(run.best or run.initial)
            run.progress = replace(run.progress, cooling_start=progress)

    def _new_gradients(self) -> Gradients:
        run = self._run
        loss = partial(_share_of_loss, run)  # a method would keep these steps, and all they refer to, alive
        return Gradients(loss, run.trainables.parameters.values(), run.capturing, run.ranks)

    def _add_gradients(self, windows: Tensor, label_weight: float = 0.0, average: bool = True) -> Tensor:
        run, tokens = self._run, torch.tensor(len(windows) * self._run.length)
        parts = torch.tensor_split(windows, -(-len(windows) // run.windows_per_pass))
        self._gradients.zero()
        losses = []
        for number, part in enumerate(parts, 1):
            labels = label_weight * run.text.labelled[part]
            last = average and number == len(parts)
            losses.append(self._gradients.add(run.text.train[part], labels, tokens, last=last))
        return torch.stack(losses).sum()

    def _seconds_per_window(self) -> float:
        """Time the second of two passes, because the first one includes set-up."""
        run = self._run
        count = max(1, BATCH // run.length) if run.capturing.enabled else run.windows_per_pass
        windows = torch.arange(min(count, len(run.text.train)))
        for _ in range(2):
            start = time.monotonic()
            float(self._add_gradients(windows, average=False))
        seconds = time.monotonic() - start
        for parameter in run.trainables.parameters.values():
            parameter.grad = None
        self._gradients = self._new_gradients()  # batches may be smaller, and captured graphs keep their memory
        return seconds / len(windows)


def _share_of_loss(run: DistillationRun, windows: Tensor, label_weights: Tensor, tokens: Tensor) -> Tensor:
    """The share of these windows in the mean loss of a batch of ``tokens`` tokens."""
    with training_autocast(run.model):
        return summed_loss(run.model, run.dense, windows, label_weights) / tokens
