"""What a healing is at, on disk: a run that was stopped goes on there when the same is asked for again."""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gac.core.errors import StatisticsError
from gac.core.io import atomic_path, from_json, home, to_json
from gac.core.version import __version__
from gac.healing.trainables import Values
from gac.healing.work import Work
from gac.models.loading import tensor_digest
from gac.reporting.figures.healing import LossPoint

logger = logging.getLogger(__name__)

EVERY = 60.0
"""Seconds between two states at least."""
SHARE = 0.05
"""The most of the time that goes into writing them."""


@dataclass(frozen=True)
class Reached:
    """How far a healing has come.

    Attributes:
        start: the loss on what is held out before anything was trained, nats a token.
        best: the least since; its values are in the state, unless that is the start.
        layers: decoder layers that are trained.
        steps: of the whole model.
        tokens: read in training.
        seconds: spent.
        span: tokens or seconds of the whole model's part that are spent.
        cooling: the part of the whole model's work at which the rate began to fall to its end, where it did early.
        losses: of the steps since the last point.
        curve: what was measured.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
    start: float
    best: float
    layers: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    span: float = 0.0
    cooling: float | None = None
    losses: tuple[float, ...] = ()
    curve: tuple[LossPoint, ...] = ()


class StateFile:
    """The state of one healing, whole or absent, in a folder of its own.

    Args:
        key: digest of everything that decides what a healing does.
    """

    def __init__(self, key: str) -> None:
        self.path = home() / "healing" / key / "state.safetensors"
        self._next = time.monotonic() + EVERY

    @property
    def is_due(self) -> bool:
        """Whether it is time for another one."""
        return time.monotonic() >= self._next

    def write(self, reached: Reached, values: Mapping[str, Values]) -> None:
        """Keep a state.

        Args:
            values: tensors by kind and by name.

        Raises:
            StatisticsError: the place cannot be written.
        """
        begun = time.monotonic()
        tensors = {f"{kind}:{name}": one for kind, own in values.items() for name, one in own.items()}
        try:
            with atomic_path(self.path) as temporary:
                save_file(tensors, temporary, {"reached": to_json(reached).decode()})
        except (OSError, SafetensorError) as failure:
            raise StatisticsError(
                f"the state of healing cannot be written to {self.path}: {failure}",
                "a writable place with room, which GAC_HOME names",
                "Make room or set GAC_HOME, and run the same again.",
            ) from failure
        now = time.monotonic()
        self._next = now + max(EVERY, (now - begun) / SHARE)

    def read(self) -> tuple[Reached, dict[str, Values]] | None:
        """The state that is there; None where there is none, or one that cannot be read, which is said."""
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                text = file.metadata()["reached"]
                held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            reached = from_json(Reached, text, f"the state of healing in {self.path}", StatisticsError)
        except (OSError, SafetensorError, KeyError, TypeError, StatisticsError) as failure:
            logger.warning("the state of healing in %s cannot be read, so it begins again: %s", self.path, failure)
            return None
        values: dict[str, Values] = {}
        for name, one in held.items():
            kind, _, own = name.partition(":")
            values.setdefault(kind, {})[own] = one
        return reached, values

    def remove(self) -> None:
        """Leave nothing behind, nor what a run that was killed as it wrote had begun."""
        shutil.rmtree(self.path.parent, ignore_errors=True)


def key_of(model: Any, dense: str, ids: Mapping[str, Tensor], work: Work) -> str:
    """The digest of a compressed model, of what it is trained on, and how.

    Args:
        dense: the digest of the dense model.
        ids: windows, and what is said of them, by what they are there for.
    """
    settings = json.dumps([dense, asdict(work), __version__, torch.__version__, model.device.type])
    digest = hashlib.sha256(settings.encode())
    for name, values in (*model.state_dict().items(), *ids.items()):
        digest.update(tensor_digest(name, values))
    return digest.hexdigest()[:40]
