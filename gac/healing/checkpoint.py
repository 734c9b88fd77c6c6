"""The checkpoint of a distillation run on disk: an interrupted run resumes when called with the same arguments."""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gac.core.errors import StatisticsError
from gac.core.io import atomic_path, from_json, home, to_json
from gac.core.version import __version__
from gac.healing.records import Progress, TrainingBudget
from gac.healing.trainables import Snapshot
from gac.models.loading import tensor_digest

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
        try:
            with atomic_path(self.path) as temporary:
                save_file(tensors, temporary, {"progress": to_json(progress).decode()})
        except (OSError, SafetensorError) as failure:
            raise StatisticsError(
                f"the checkpoint of healing cannot be written to {self.path}: {failure}",
                "a writable directory with enough space in GAC_HOME",
                "Make room or set GAC_HOME, and run the same again.",
            ) from failure
        now = time.monotonic()
        self._next = now + max(INTERVAL, (now - start) / TIME_SHARE)

    def read(self) -> tuple[Progress, dict[str, Snapshot]] | None:
        """The checkpoint; None if there is none, or if it is damaged, which is logged."""
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                text = file.metadata()["progress"]
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
            progress = from_json(Progress, text, f"the checkpoint of healing in {self.path}", StatisticsError)
        except (OSError, SafetensorError, KeyError, TypeError, StatisticsError) as failure:
            logger.warning("the checkpoint of healing in %s cannot be read, starting afresh: %s", self.path, failure)
            return None
        values: dict[str, Snapshot] = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition(":")
            values.setdefault(kind, {})[name] = tensor
        return progress, values

    def remove(self) -> None:
        """Remove the checkpoint, and what a killed run was writing."""
        shutil.rmtree(self.path.parent, ignore_errors=True)


def key_of(model: Any, dense_digest: str, text: Mapping[str, Tensor], budget: TrainingBudget) -> str:
    """A digest of a compressed model, the dense model, the tensors of the text, and the budget."""
    settings = json.dumps([dense_digest, asdict(budget), __version__, torch.__version__, model.device.type])
    digest = hashlib.sha256(settings.encode())
    for name, values in (*model.state_dict().items(), *text.items()):
        digest.update(tensor_digest(name, values))
    return digest.hexdigest()[:40]
