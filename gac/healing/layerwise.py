"""Block-local distillation: train the decoder layers one at a time, in order.

A layer's input is that of the compressed model, trained so far; its target is the output of the dense layer in the
dense model. So it also corrects the errors of the layers before it. The loss is the squared error of each token
relative to the squared norm of its target, because the next RMSNorm normalises every token.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean

import torch
from torch import Tensor, nn

from gac.core.progress import progress_bar
from gac.healing.gradients import Gradients
from gac.healing.optimizer import RelativeAdamW, Span, rate_for_batch, schedule
from gac.healing.run import DistillationRun
from gac.healing.text import shuffled
from gac.healing.trainables import gradients_of, snapshot
from gac.models.families import text_config
from gac.models.layer_stack import LayerStack, entering, room
from gac.models.modules import input_device, run_on, training_autocast

logger = logging.getLogger(__name__)

BATCH = 4096  # tokens of a step, in full windows
STEPS = 8  # the minimum number of steps per layer; batches get smaller to allow it
FORWARD_SHARE = 0.25  # the largest share of the time for passing hidden states through the layers
STATE_COPIES = 4  # sets of hidden states that have to fit on a device


def train_layers(run: DistillationRun) -> None:
    """Train the layers that are not trained yet; restore the initial model if the whole model got worse."""
    budget, left = run.budget, run.seconds_left
    seconds = None if left is None else budget.blocks * left
    if run.progress.layers < len(run.layer_names) and budget.blocks and (seconds is None or seconds > 0):
        _train(run, seconds)
        loss, start = run.evaluate_heldout(), run.progress.start_loss
        if loss > start:
            message = "training single layers raised the held-out loss from %.4f to %.4f nats a token: starting afresh"
            logger.warning(message, start, loss)
            run.trainables.restore(run.initial)
        run.checkpoint(tuple)
    run.progress = replace(run.progress, layers=len(run.layer_names))


def _train(run: DistillationRun, seconds: float | None) -> None:
    batches, heldout = _batches(run, seconds)
    numbers = sum(ids.numel() for ids in (*batches, *heldout))
    device = input_device(run.dense)
    needed = STATE_COPIES * numbers * text_config(run.dense.config).hidden_size * run.dense.dtype.itemsize
    on_host = device.type != "cpu" and needed > room(device)
    with training_autocast(run.model):  # masters have another dtype than the rest
        teacher, student = (
            HiddenStates(model, run.layers(model), [*batches, *heldout], on_host) for model in (run.dense, run.model)
        )
    start, count = time.monotonic(), len(run.layer_names)
    with (
        progress_bar("healing layers", "layer", total=count, shown=run.show_progress) as bar,
        training_autocast(run.model),
    ):
        for layer in range(count):
            teacher.advance(layer)
            if layer >= run.progress.layers:
                share = None if seconds is None else (seconds - (time.monotonic() - start)) / (count - layer)
                _Layer(run, layer, student, teacher.states, len(batches)).train(share)
            student.advance(layer)
            bar.update()


def _batches(run: DistillationRun, seconds: float | None) -> tuple[list[Tensor], list[Tensor]]:
    text, heldout, count = run.text, run.text.heldout, run.ranks.count
    if seconds is None:
        windows = int(run.budget.blocks * (run.budget.tokens or 0)) // run.length
    else:
        affordable = FORWARD_SHARE * seconds * len(heldout) / max(run.evaluation_seconds, 1e-9)
        windows = run.ranks.once(lambda: int(affordable))
    windows = min(max(windows, STEPS * count), len(text.epoch))
    size = max(1, min(BATCH // run.length, windows // (STEPS * count)))
    local = text.train[text.batch(0, windows, run.budget.seed)][run.ranks.rank :: count][: windows // count]
    return [*torch.split(local, size)], [*torch.split(heldout, size)]


class HiddenStates:
    """Inputs of a model's next layer, ``states`` of shape ``(windows, tokens, hidden)`` for each batch of token ids."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], batches: Sequence[Tensor], on_host: bool) -> None:
        self._layers, self._on_host = layers, on_host
        self._stack = LayerStack(model, layers)
        with torch.no_grad(), self._stack.traced(0, lambda _layer, _hidden: None):
            run_on(model, batches[0][:1])
        self.states: list[Tensor] = [self._moved(hidden) for hidden in entering(model, layers[0], batches)]

    def run(self, layer: int, hidden: Tensor) -> Tensor:
        """A layer's output for states ``(windows, tokens, hidden)``."""
        return self._stack.run(layer, hidden.to(next(self._layers[layer].parameters()).device))

    @torch.no_grad()
    def advance(self, layer: int) -> None:
        for batch, hidden in enumerate(self.states):
            self.states[batch] = self._moved(self.run(layer, hidden))

    def _moved(self, hidden: Tensor) -> Tensor:
        return hidden.cpu() if self._on_host else hidden


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer in training, with the first ``batches`` of the states; the others are held out."""

    context: DistillationRun
    layer: int
    student: HiddenStates
    targets: Sequence[Tensor]
    batches: int

    def train(self, seconds: float | None) -> None:
        run = self.context
        parameters = run.trainables.of_layer(run.layer_names[self.layer])
        before = after = self._heldout_error()
        tokens = 0
        if parameters and before > 0:
            initial = snapshot(parameters)
            tokens = self._take_steps(parameters, seconds)
            if not (after := self._heldout_error()) < before:
                run.trainables.restore(initial)
        total = run.progress.tokens + tokens // len(run.layer_names)
        run.progress = replace(run.progress, layers=self.layer + 1, tokens=total)
        run.record_loss("blocks", self.layer, before, min(after, before))
        if run.progress.layers < len(run.layer_names):  # the last layer's checkpoint follows the evaluation of them all
            run.checkpoint(tuple)

    def _take_steps(self, parameters: dict[str, nn.Parameter], seconds: float | None) -> int:
        run, budget, ranks = self.context, self.context.budget, self.context.ranks
        span = Span(ranks, seconds, None if budget.tokens is None else int(budget.blocks * budget.tokens))
        rate = rate_for_batch(budget.learning_rate, self.student.states[0].shape[:2].numel(), BATCH)
        optimizer = RelativeAdamW(parameters, run.rms, rate, ranks)
        pairs = [*zip(self.student.states[: self.batches], self.targets[: self.batches], strict=True)]
        loss = partial(_layer_loss, self.student, self.layer)
        rate_text = f" with learning_rate={budget.learning_rate:g}"
        total = step = 0
        with gradients_of(parameters):
            gradients = Gradients(loss, parameters.values(), run.capturing, ranks)
            while (progress := span.progress()) < 1:
                epoch, place = divmod(step, len(pairs))
                hidden, target = pairs[int(shuffled(len(pairs), budget.seed + 1 + self.layer, epoch)[place])]
                gradients.zero()
                value = gradients.add(hidden, target)
                step += 1
                optimizer.step(value, schedule(progress), f"step {step} of layer {self.layer}{rate_text}")
                tokens = target.shape[0] * target.shape[1] * ranks.count
                span.add(tokens)
                total += tokens
        return total

    @torch.no_grad()
    def _heldout_error(self) -> float:
        pairs = zip(self.student.states[self.batches :], self.targets[self.batches :], strict=True)
        error = mean(float(_layer_loss(self.student, self.layer, hidden, target)) for hidden, target in pairs)
        return self.context.ranks.once(lambda: error)


def _layer_loss(student: HiddenStates, layer: int, hidden: Tensor, target: Tensor) -> Tensor:
    """The mean over tokens of ``|output - target|^2 / |target|^2``, float32."""
    output = student.run(layer, hidden)
    target = target.to(output.device).float()
    errors = (output.float() - target).square().sum(-1) / target.square().sum(-1).clamp_min(1e-12)
    return errors.mean()
