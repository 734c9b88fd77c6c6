"""What the loss of Gemma-3-270M comes from: plans at three budgets, with one cause taken away at a time.

    python tests/benchmarks/gemma.py --output tests/benchmarks/results/gemma.json

Every row has the loss that was predicted and the one measured, ln(ppl / dense), on three texts held back and (``seen``)
on the first windows of calibration text: what is lost on the one and not on the other was fitted to the text. Every
window begins with BOS. The packages of ``gemma3-270m`` and a GPU are needed. Rows come in the order of what they tell,
none is begun after ``--seconds``, and the same command goes on there. At 0.8, beside the default and no refit:

- ``more text``: three times the windows; ``power 0``: all tokens count alike; ``power 1``: by the norms of their
  gradients and activations, not by the squares of these;
- ``not cross-fitted``: moments of the whole text, damped instead;
- ``damping x0.3``, ``x3``, ``x10``: of the metric, in which weights are truncated and priced;
- ``refit damping x0.3``, ``x3``, ``x10``: of the regressions, in which they are fitted again;
- ``not scaled``: the last norm stays as it is;
- ``no BOS``: calibration windows are text alone; ``BOS not counted``: that token is left out of all statistics and of
  the refit;
- ``inner step 0``, ``1``: weights inside a layer are fitted to their own outputs, or the whole way to the dense ones;
- ``own outputs``: o_proj and down_proj are not fitted to what the residual stream has lost before them;
- ``two shots``: gradients at a first plan.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import gac
from gac.compression import refit as confidence
from gac.compression.paired_run import Norm
from gac.forms import refit
from gac.forms.curvature.methods import DAMPING, Kfac
from gac.measurement.runs import window_loss
from gac.measurement.sums import MomentSums
from gac.measurement.text import calibration_windows
from tests.benchmarks.curvature import own_statistics, tuned, uncrossed
from tests.benchmarks.harness import OF_A_STUDY, Study, options

SEEN = 16
"""Windows of calibration text on which models are measured too."""


@dataclass(frozen=True)
class Cause:
    """One cause taken away: options of ``gac.allocate``, and what holds while a plan is made and applied."""

    options: dict[str, Any] = field(default_factory=dict)
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


def main() -> None:
    parser = options(__doc__, *OF_A_STUDY, "--budgets")
    parser.add_argument("--at", type=float, default=0.8, help="the budget of all rows but the first two causes'")
    parser.add_argument("--seconds", type=float, default=210, help="no row is begun after that")
    parser.add_argument("--only", choices=tuple(CAUSES), action="append", help="repeatable; all by default")
    parser.set_defaults(model="gemma3-270m", profile="nvidia-h200", budgets=[0.9, 0.8, 0.7], windows=64)
    begun, asked = time.monotonic(), parser.parse_args()
    study = MeasuredOnBoth(asked)
    for name in asked.only or CAUSES:
        cause = CAUSES[name]
        with cause.within():
            for budget in asked.budgets if name in ("default", "no refit") else [asked.at]:
                if time.monotonic() - begun > asked.seconds:
                    print(f"stopped before {name!r} at {budget}: {asked.seconds:.0f} s are over")
                    return
                study.add({"cause": name}, budget, **cause.options)


class MeasuredOnBoth(Study):
    """A study whose rows have the loss on calibration text too, and how many seconds it took to measure."""

    def __init__(self, asked: argparse.Namespace) -> None:
        super().__init__(asked)
        self._seen = calibration_windows(
            f"{asked.calibration.partition(':')[0]}:{SEEN}x1024", self.loaded.tokenizer
        ).ids
        self._dense = self._on_seen(self.loaded.model)
        print(f"dense perplexity on calibration text {math.exp(self._dense):.4f}")

    def quality(self, model: Any) -> dict[str, Any]:
        return {"seen": self._on_seen(model) - self._dense} | super().quality(model)

    def measured(self, plan: gac.Plan) -> dict[str, Any]:
        found = super().measured(plan)
        return {"fit": found["measured"] / found["predicted"]} | found

    def _on_seen(self, model: Any) -> float:
        with torch.no_grad():
            losses = [float(window_loss(model, ids)) for ids in self._seen]
        return sum(losses) / (self._seen.numel() - len(self._seen))


def damping(factor: float) -> AbstractContextManager[Any]:
    return tuned(argparse.Namespace(power=Kfac.power, damping=(factor * DAMPING, 0.0)))


def power(power: float) -> AbstractContextManager[Any]:
    return tuned(argparse.Namespace(power=power, damping=(DAMPING, 0.0)))


def refit_damping(factor: float) -> AbstractContextManager[Any]:
    return mock.patch.multiple(refit, MEAN_DAMPING=factor * refit.MEAN_DAMPING, OWN_DAMPING=factor * refit.OWN_DAMPING)


def inner_step(step: float) -> AbstractContextManager[Any]:
    return mock.patch.object(refit, "STEP", step)


def own_outputs() -> AbstractContextManager[Any]:
    return mock.patch.object(Norm, "step", lambda _self, _outputs, more: torch.zeros_like(more))


def not_scaled() -> AbstractContextManager[Any]:
    return mock.patch.multiple(confidence, LEAST=1.0, MOST=1.0)


@contextmanager
def without_bos() -> Iterator[None]:
    """The first token of a window is left out of the moments."""
    add = MomentSums._add

    def counted(sums: MomentSums, name: str, activations: Tensor, gradients: Tensor) -> None:
        add(sums, name, activations, torch.cat([0 * gradients[:, :1], gradients[:, 1:]], dim=1))

    with own_statistics(), mock.patch.object(MomentSums, "_add", counted):
        yield


CAUSES = {
    "default": Cause(),
    "no refit": Cause({"refit": "none"}),
    "more text": Cause({"calibration": "wiki-sample:190x1024"}),
    "refit damping x0.3": Cause({}, partial(refit_damping, 0.3)),
    "inner step 1": Cause({}, partial(inner_step, 1.0)),
    "power 1": Cause({}, partial(power, 1)),
    "not scaled": Cause({}, not_scaled),
    "power 0": Cause({}, partial(power, 0)),
    "inner step 0": Cause({}, partial(inner_step, 0.0)),
    "refit damping x3": Cause({}, partial(refit_damping, 3)),
    "not cross-fitted": Cause({}, uncrossed),
    "own outputs": Cause({}, own_outputs),
    "damping x3": Cause({}, partial(damping, 3)),
    "no BOS": Cause({"bos": False}),
    "damping x10": Cause({}, partial(damping, 10)),
    "refit damping x10": Cause({}, partial(refit_damping, 10)),
    "BOS not counted": Cause({}, without_bos),
    "two shots": Cause({"shots": 2}),
    "damping x0.3": Cause({}, partial(damping, 0.3)),
}


if __name__ == "__main__":
    main()
