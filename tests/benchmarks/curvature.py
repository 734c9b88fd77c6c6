"""What other ways to take the curvature win: a second shot, and the labels of the text (the empirical Fisher).

    python tests/benchmarks/curvature.py --calibration wiki-sample:190x1024 --only "two shots" --output shots.json

``two shots`` is ``gac.allocate(..., shots=2)``. ``text``: the loss whose gradients are taken is that of the text
itself. ``not cross-fitted``: moments of the whole text, damped instead. ``tuned``: ``--power`` and ``--damping`` stand
in for those of ``kfac``. ``one shot`` is what GAC does by default: labels drawn from the dense model. No way's
statistics are mixed with another's.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from gac.compression.first_shot import FIRST_KEPT
from gac.core.io import home
from gac.core.linalg import damped
from gac.forms.curvature.methods import DAMPING, UNCROSSED, Kfac
from gac.forms.curvature.metric import Halves, Moments
from gac.measurement.runs import window_loss
from tests.benchmarks.harness import OF_A_STUDY, Study, options


def main() -> None:
    parser = options(__doc__, *OF_A_STUDY, "--budgets")
    parser.add_argument("--power", type=float, default=Kfac.power, help="p, see gac.measurement.calibration")
    parser.add_argument("--damping", type=float, nargs=2, default=(DAMPING, 0.0), metavar=("MEAN", "OWN"))
    parser.add_argument("--only", choices=tuple(WAYS), action="append", help="repeatable; all by default")
    parser.set_defaults(budgets=[0.8, 0.6], first=FIRST_KEPT)
    asked = parser.parse_args()
    study = Study(asked, "first", "power", "damping")
    for way in asked.only or WAYS:
        with WAYS[way](asked):
            for budget in asked.budgets:
                for refit in ("none", "residual"):
                    study.add({"way": way}, budget, refit=refit, shots=2 if way == "two shots" else 1)


@contextmanager
def of_the_text(_asked: argparse.Namespace) -> Iterator[None]:
    def loss(model: Any, ids: Tensor, what: str, seed: int) -> tuple[Tensor, Tensor]:
        found = window_loss(model, ids, what)
        return found.detach(), found

    with own_statistics(), mock.patch("gac.measurement.layerwise.drawn_loss", loss):
        yield


@contextmanager
def tuned(asked: argparse.Namespace) -> Iterator[None]:
    def inputs(_method: Kfac, moments: Moments) -> Tensor:
        return damped(moments.inputs, *asked.damping)

    def gradients(_method: Kfac, moments: Moments) -> Tensor:
        return damped(moments.gradients, *asked.damping)

    with own_statistics("layer-*"), mock.patch.multiple(Kfac, power=asked.power, inputs=inputs, gradients=gradients):
        yield


@contextmanager
def uncrossed(_asked: argparse.Namespace | None = None) -> Iterator[None]:
    def pooled(_method: Kfac, halves: Halves) -> Tensor:
        return damped(halves.mean(), *UNCROSSED).float()

    with own_statistics("layer-*"), mock.patch.object(Kfac, "pooled", pooled):
        yield


@contextmanager
def own_statistics(*patterns: str) -> Iterator[None]:
    """A GAC_HOME with the texts of this one, and of the statistics no other files than those that are named."""
    with tempfile.TemporaryDirectory() as folder:
        for pattern in ("text/*", *(f"statistics/*/{one}" for one in patterns)):
            for path in home().glob(pattern):
                copy_to = Path(folder) / path.relative_to(home())
                copy_to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy_to)
        with mock.patch.dict(os.environ, {"GAC_HOME": folder}):
            yield


WAYS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "one shot": nullcontext,
    "two shots": nullcontext,
    "text": of_the_text,
    "tuned": tuned,
    "not cross-fitted": uncrossed,
}


if __name__ == "__main__":
    main()
