"""Peers' rules by name, and the importance objective; what they measure of the model imports torch when it is asked."""

from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gac.allocation.dims import step_of
from gac.allocation.problem import Problem
from gac.allocation.weight_rules import Chosen, RankRule, WeightRule, at_ranks, curves_of, weights_of
from gac.baselines.importance import most_important
from gac.baselines.ranks import fisher_ranks, fisher_score, sensitivity_ranks, uniform_ranks, zero_sum_ranks
from gac.core.arrays import Floats, Ints
from gac.forms import Form
from gac.models.sites import Site, Weight

if TYPE_CHECKING:
    from gac.measurement.calibration import CalibrationRun


class Uniform(RankRule):
    """Every weight keeps the same fraction (SVD-LLM)."""

    name = "uniform"
    limits_cache = True

    def ranks(
        self, problem: Problem, weights: Sequence[Weight], form: Form, fraction: float, limit: int
    ) -> dict[str, int]:
        return uniform_ranks(weights, fraction, form)


class Fisher(RankRule):
    """Ranks in proportion to how much a weight's parameters matter (PaLU)."""

    name = "fisher"
    limits_cache = True

    def ranks(
        self, problem: Problem, weights: Sequence[Weight], form: Form, fraction: float, limit: int
    ) -> dict[str, int]:
        return fisher_ranks(weights, _scores(problem, weights, form), limit, form)


class _MeasuringRule(RankRule):
    """Ranks from what is measured of every weight, besides its loss curve."""

    stream: ClassVar[str]
    """The ``Stream`` that measures it, ``module:function``; imported when it is asked."""

    def measure(self, run: "CalibrationRun", sites: Sequence[Site]) -> Mapping[str, Floats]:
        from gac.baselines.measurements import measure_layers

        kind = self.name.partition(":")[0]  # whatever the rounding
        return measure_layers(kind, resolve_name(self.stream), run, sites)


class ZeroSum(_MeasuringRule):
    """Components are dropped so that the predicted changes of the loss sum to about zero (ZS-SVD)."""

    name = "zero-sum"
    stream = "gac.baselines.first_order:stream_changes"

    def ranks(
        self, problem: Problem, weights: Sequence[Weight], form: Form, fraction: float, limit: int
    ) -> dict[str, int]:
        return zero_sum_ranks(weights, problem.measurements, limit)


class Sensitivity(_MeasuringRule):
    """One threshold on what truncating a weight alone loses (ASVD)."""

    name = "sensitivity"
    stream = "gac.baselines.truncation_losses:stream_truncation_losses"

    def ranks(
        self, problem: Problem, weights: Sequence[Weight], form: Form, fraction: float, limit: int
    ) -> dict[str, int]:
        return sensitivity_ranks(weights, problem.measurements, limit)


class Importance(WeightRule):
    """Scores times parameters, over sound ranks near the uniform ones, solved exactly."""

    name = "importance"
    aligned = True

    def choose(self, problem: Problem, form: Form, fraction: float, limit: int) -> dict[str, Chosen]:
        weights = weights_of(problem)
        uniform = at_ranks(weights, uniform_ranks(weights, fraction, form), None, form)
        return most_important(weights, _scores(problem, weights, form), uniform, _sound_ranks(problem, form), limit)


def _scores(problem: Problem, weights: Sequence[Weight], form: Form) -> dict[str, float]:
    curves = curves_of(problem, form)
    return {weight.name: fisher_score(weight, curves[weight.name]) for weight in weights}


def _sound_ranks(problem: Problem, form: Form) -> dict[str, Ints]:
    """The ranks of each weight that save parameters; where dims are to be aligned, only those that are sound."""
    align = problem.recipe.space.align
    step = step_of(form, align)
    found = {}
    for site in problem.sites:
        for at, weight in enumerate(site.weights):
            ranks = np.arange(step, form.max_useful_dim(weight) + 1, step, dtype=np.int64)
            sound = problem.timing.sound(form, weight, ranks, at in site.fused) if align else slice(None)
            found[weight.name] = ranks[sound]
    return found
