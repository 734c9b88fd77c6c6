"""State of a distillation run: models, trainable parameters, held-out windows, best snapshot; and its checkpoint."""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gac.core.distributed.ranks import Ranks
from gac.core.errors import StatisticsError
from gac.core.io import from_json, home, to_json
from gac.core.version import __version__
from gac.healing.gradients import Capturing, can_capture
from gac.healing.losses import mean_loss, windows_per_pass
from gac.healing.records import LossPoint, Progress, TrainingBudget
from gac.healing.sharding import fits, shard
from gac.healing.text import HealingText
from gac.healing.trainables import Snapshot, Trainables, trained_weights
from gac.measurement.store import CPU, read_tensors, write_tensors
from gac.models.digests import tensor_digest
from gac.models.families import family_of, text_config
from gac.models.modules import input_device, training_autocast
from gac.plan.plan import Plan
from gac.runtime.storage.modules import count_parameters

logger = logging.getLogger(__name__)

INTERVAL = 60.0  # the minimum number of seconds between two checkpoints
TIME_SHARE = 0.05  # the largest share of the time that writing them takes


class CheckpointFile:
    """The checkpoint, complete or absent, of the run with this digest of everything that decides its result."""

    def __init__(self, key: str) -> None:
        self.path = home() / "healing" / key / "state.safetensors"
        self._next = time.monotonic() + INTERVAL

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def write(self, progress: Progress, values: Mapping[str, Snapshot]) -> None:
        """Write the progress, and snapshots by kind; a StatisticsError if the path cannot be written."""
        start = time.monotonic()
        tensors = {f"{kind}:{name}": tensor for kind, named in values.items() for name, tensor in named.items()}
        text = torch.frombuffer(bytearray(to_json(progress)), dtype=torch.uint8)
        write_tensors(self.path, tensors | {"progress": text})
        now = time.monotonic()
        self._next = now + max(INTERVAL, (now - start) / TIME_SHARE)

    def read(self) -> tuple[Progress, dict[str, Snapshot]] | None:
        """The checkpoint; None if there is none, or if it is damaged, which is logged."""
        try:
            tensors = read_tensors(self.path, CPU)
            text = tensors.pop("progress").numpy().tobytes()
            progress = from_json(Progress, text, f"the checkpoint of healing in {self.path}", StatisticsError)
        except FileNotFoundError:
            return None
        except (KeyError, StatisticsError) as failure:
            logger.warning("the checkpoint of healing in %s cannot be read, starting afresh: %s", self.path, failure)
            return None
        values: dict[str, Snapshot] = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition(":")
            values.setdefault(kind, {})[name] = tensor
        return progress, values

    def remove(self) -> None:
        shutil.rmtree(self.path.parent, ignore_errors=True)


def key_of(model: Any, dense_digest: str, text: Mapping[str, Tensor], budget: TrainingBudget) -> str:
    settings = json.dumps([dense_digest, asdict(budget), __version__, torch.__version__, model.device.type])
    digest = hashlib.sha256(settings.encode())
    for name, values in (*model.state_dict().items(), *text.items()):
        digest.update(tensor_digest(name, values))
    return digest.hexdigest()[:40]


def trainables_of(model: Any, plan: Plan, budget: TrainingBudget) -> Trainables:
    return Trainables(model, plan.weights, {each.name for each in trained_weights(plan, budget.dense)})


@dataclass(eq=False)
class DistillationRun:
    """A run in progress. The compressed model is trained in place, and needs no gradients otherwise."""

    model: Any
    dense: Any  # the dense model, in the same basis
    plan: Plan
    text: HealingText
    budget: TrainingBudget
    file: CheckpointFile
    ranks: Ranks
    start: float  # the start of the work by ``time.monotonic``
    show_progress: bool
    initial: Snapshot = field(default_factory=dict, init=False)  # before training
    best: Snapshot = field(default_factory=dict, init=False)  # with the least held-out loss, if that fell
    optimizer_state: Snapshot = field(default_factory=dict, init=False)  # of an interrupted run

    def __post_init__(self) -> None:
        layers, model = family_of(self.model.config).layers, self.model
        self.layer_names = [f"{layers}.{layer}" for layer in range(text_config(model.config).num_hidden_layers)]
        self.windows_per_pass = windows_per_pass(model, self.length, self.ranks)
        self.trainables = trainables_of(model, self.plan, self.budget)
        self.rms = self.trainables.rms()
        self.progress, self.evaluation_seconds = Progress(inf, inf), 0.0
        self.capturing = Capturing(can_capture(model, self.dense))
        device = input_device(model)  # which holds the masters by now, and may have room for the best snapshot too
        self._best_on_device = device.type == "cuda" and fits(self.trainables.count, device)

    def shard(self, mesh: DeviceMesh) -> None:
        for model in (self.model, self.dense):
            shard(model, self.layers(model), mesh)
        self.trainables.rebind()
        self.capturing.enabled = self._best_on_device = False

    def start_or_resume(self) -> None:
        """Measure the held-out loss, and load the checkpoint of an interrupted run if every process has it."""
        self.initial, start = self.trainables.snapshot(), time.monotonic()
        loss = self._heldout_loss()
        self.evaluation_seconds = time.monotonic() - start
        self.progress = Progress(loss, loss)
        checkpoint = self.file.read()
        positions = self.ranks.gathered(None if checkpoint is None else checkpoint[0].tokens)
        if checkpoint is not None and len({*positions}) == 1:
            self.progress, values = checkpoint
            self.trainables.restore(self.trainables.shard(values["now"]))
            self.best = self.trainables.shard(values.get("best", {}))
            self.optimizer_state = values.get("optimizer", {})
            self.start -= self.progress.seconds
            logger.info("healing resumes after %d layers and %d steps", self.progress.layers, self.progress.steps)
            return
        logger.info(
            "healing %s of %s parameters on %d windows of %s, %d more held out: loss %.4f nats a token",
            f"{self.trainables.count:,}",
            f"{count_parameters(self.model):,}",
            len(self.text.train),
            " and ".join(self.text.names),
            len(self.text.heldout),
            loss,
        )

    @property
    def length(self) -> int:
        return int(self.text.train.shape[1])

    @property
    def seconds_left(self) -> float | None:
        """Seconds left in the budget, the same in every process; None if tokens are counted."""
        minutes = self.budget.minutes
        return None if minutes is None else self.ranks.once(lambda: 60 * minutes - self._elapsed)

    def layers(self, model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule(name) for name in self.layer_names]

    def evaluate_heldout(self) -> float:
        """The held-out loss, nats a token; takes the best snapshot if it is the least so far."""
        loss = self._heldout_loss()
        if loss < self.progress.best_loss:
            self.best = self.trainables.snapshot(self.best, self._best_on_device)
            self.progress = replace(self.progress, best_loss=loss)
        return loss

    def record_loss(self, phase: str, step: int, train_loss: float, heldout_loss: float) -> None:
        point = LossPoint(phase, step, self.progress.tokens, self._elapsed, train_loss, heldout_loss)
        self.progress = replace(self.progress, curve=(*self.progress.curve, point), recent_losses=())
        logger.debug("%s", point)

    def checkpoint(self, optimizer_state: Callable[[], Iterable[tuple[str, Tensor]]], spent: float = 0.0) -> None:
        """Write a checkpoint if one is due, with the tokens or seconds ``spent`` on the whole model."""
        if not self.ranks.once(lambda: self.file.is_due):
            return
        kinds = {
            "now": self.trainables.gather(),
            "optimizer": optimizer_state(),
            "best": self.trainables.gather(self.best),
        }
        values = {  # every process has to iterate, but rank 0 alone keeps the tensors
            kind: {name: tensor.to("cpu", copy=True) for name, tensor in named if self.ranks.leads}
            for kind, named in kinds.items()
        }
        if self.ranks.leads:
            self.progress = replace(self.progress, seconds=self._elapsed, spent=spent)
            self.file.write(self.progress, values)

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self.start

    def _heldout_loss(self) -> float:
        with training_autocast(self.model):
            labels = self.budget.labels * self.text.heldout_labelled
            return mean_loss(self.model, self.dense, self.text.heldout, self.windows_per_pass, labels, self.ranks)
