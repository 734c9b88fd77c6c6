"""What other ways to take the curvature win: a second shot, and the labels of the text (the empirical Fisher).

    python tests/benchmarks/curvature.py --calibration wiki-sample:190x1024 --only "two shots" --output shots.json

``two shots`` is ``gac.allocate(..., shots=2)``. ``text``: the loss whose gradients are taken is that of the text
itself. ``tuned``: ``--power`` and ``--damping`` stand in for those of ``kfac``. ``one shot`` is what GAC does by
default: labels drawn from the dense model. No way's statistics are mixed with another's.
"""

import argparse
import copy
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from reading import machine, read
from torch import Tensor

import gac
from gac.compression.first_shot import FIRST_KEPT
from gac.forms.metric import Moments
from gac.io import atomic_path, home
from gac.linalg import damped
from gac.models.loading import Loaded
from gac.sensitivity.losses import window_loss
from gac.sensitivity.methods import Kfac


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--calibration", default="wiki-sample:64x1024")
    parser.add_argument("--profile", default="nvidia-h100-80gb-hbm3")
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.8, 0.6])
    parser.add_argument("--power", type=float, default=Kfac.power, help="p, see gac.sensitivity.calibration")
    parser.add_argument("--damping", type=float, nargs=2, default=(1e-2, 3e-2), metavar=("MEAN", "OWN"))
    parser.add_argument("--only", choices=tuple(WAYS), action="append", help="repeatable; all by default")
    parser.add_argument("--windows", type=int, help="evaluation windows; all where not given")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    loaded = read(asked.model)
    dense = gac.perplexity(loaded.model, loaded.tokenizer, windows=asked.windows)
    print(f"dense {dense}")
    rows: list[dict[str, Any]] = []
    for way in asked.only or WAYS:
        with WAYS[way](asked):
            for budget in asked.budgets:
                for refit in ("none", "residual"):
                    rows.append({"way": way} | measured(loaded, way, budget, refit, asked, dense.value))
                    print(rows[-1], flush=True)
                    write(asked, dense, rows)


def write(asked: argparse.Namespace, dense: gac.Perplexity, rows: list[dict[str, Any]]) -> None:
    head = {"model": asked.model, "calibration": asked.calibration, "protocol": dense.protocol, "first": FIRST_KEPT}
    head |= {"power": asked.power, "damping": asked.damping, **machine(), "dense": dense.value}
    with atomic_path(asked.output) as temporary:
        temporary.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


def measured(
    loaded: Loaded, way: str, budget: float, refit: str, asked: argparse.Namespace, dense: float
) -> dict[str, float | str]:
    plan = gac.allocate(
        loaded.model,
        budget,
        profile=asked.profile,
        refit=refit,
        shots=2 if way == "two shots" else 1,
        calibration=asked.calibration,
        tokenizer=loaded.tokenizer,
    )
    compressed = gac.compress(copy.deepcopy(loaded.model), plan, tokenizer=loaded.tokenizer)
    found = gac.perplexity(compressed, loaded.tokenizer, windows=asked.windows)
    ratio = found.value / dense
    return {
        "budget": budget,
        "refit": refit,
        "ratio": ratio,
        "measured": math.log(ratio),
        "predicted": plan.prediction.loss,
    }


@contextmanager
def as_it_is(_asked: argparse.Namespace) -> Iterator[None]:
    yield


@contextmanager
def of_the_text(_asked: argparse.Namespace) -> Iterator[None]:
    def loss(model: Any, ids: Tensor, what: str, seed: int) -> tuple[Tensor, Tensor]:
        found = window_loss(model, ids, what)
        return found.detach(), found

    with own_statistics(), mock.patch("gac.sensitivity.layerwise.drawn_loss", loss):
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
def own_statistics(*patterns: str) -> Iterator[None]:
    """A GAC_HOME with the texts of this one, and of the statistics no other files than those that are named."""
    with tempfile.TemporaryDirectory() as folder:
        for path in [
            *home().glob("text/*"),
            *(path for one in patterns for path in home().glob(f"statistics/*/{one}")),
        ]:
            copy_to = Path(folder) / path.relative_to(home())
            copy_to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy_to)
        with mock.patch.dict(os.environ, {"GAC_HOME": folder}):
            yield


WAYS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "one shot": as_it_is,
    "two shots": as_it_is,
    "text": of_the_text,
    "tuned": tuned,
}


if __name__ == "__main__":
    main()
