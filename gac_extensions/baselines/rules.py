"""Peers' rules: ranks as functions of weights, scores and a limit, and the rules that ``--rule`` names."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import inf

import numpy as np

from gac.allocation.dims import step_of
from gac.allocation.knapsack import Group, knapsack
from gac.allocation.problem import Problem
from gac.allocation.weight_rules import Chosen, RankRule, WeightRule, at_ranks, curves_of, weights_of
from gac.core.arrays import Floats, Ints
from gac.forms import Form, form_named
from gac.forms.loss_curves import LossCurve
from gac.models.sites import Weight

LOW_RANK = form_named("low_rank")
WINDOW = 64
"""Largest distance of a candidate of ``Importance`` from the unaligned rank."""
Ranks = dict[str, int]
"""Ranks by weight name; above ``max_useful_dim`` where a weight stays dense."""


def _count(form: Form, weight: Weight, dim: int | None = None) -> int:
    """The amount of what the form's ranks share out; of the dense weight without a dim."""
    if form.rule_resource == "params":
        return weight.params if dim is None else form.params(weight, dim)
    return weight.cached_numbers if dim is None else form.cache.numbers(weight, dim)


def uniform_ranks(weights: Sequence[Weight], budget: float, form: Form = LOW_RANK) -> Ranks:
    """SVD-LLM (arXiv 2403.07378): every weight keeps the fraction ``budget``, ``rank = int(m * n * budget / (m + n))``.

    The fraction is of its parameters, or of its KV cache where the form counts that; ranks are not aligned.
    """
    return {weight.name: int(_count(form, weight) * budget / _count(form, weight, 1)) for weight in weights}


def fisher_score(weight: Weight, curve: LossCurve) -> float:
    """Loss of dropping the weight, in nats a token, over its parameters.

    PaLU scores a weight with the mean over its entries of the root of the mean squared gradient (arXiv 2407.21118). The
    loss at rank 0, with the curvature of K-FAC ``1/2 tr(G W A W^T)``, has squared gradients too, weighed by the squared
    weights and without the root.
    """
    return float(curve.loss[0]) / weight.params


def fisher_ranks(weights: Sequence[Weight], scores: Mapping[str, float], limit: int, form: Form = LOW_RANK) -> Ranks:
    """PaLU (arXiv 2407.21118): ranks in proportion to the scores, rounded down, as many as the limit allows.

    PaLU shares out ranks between groups of heads of one shape, ``rank_i = total * F_i / sum(F)``, and caps them. Here
    shapes may differ, so what the form counts is shared out: ``rank_i = floor(t F_i)`` with ``t`` such that the weights
    take ``limit``. A weight that its form would make no smaller stays dense, and the others share what it leaves.

    Args:
        scores: by weight name, 0 or more (``fisher_score``).
        limit: parameters of all weights, or their numbers in the KV cache where the form counts those.
    """
    ranks: Ranks = {}
    available, sharing = limit, list(weights)
    while sharing:
        total = sum(scores[weight.name] * _count(form, weight, 1) for weight in sharing)
        each = max(available, 0) / total if total else 0.0
        shares = {weight.name: int(each * scores[weight.name]) for weight in sharing}
        capped = [weight for weight in sharing if shares[weight.name] > form.max_useful_dim(weight)]
        if not capped:
            return ranks | {name: max(1, share) for name, share in shares.items()}
        ranks |= {weight.name: form.full(weight) for weight in capped}
        available -= sum(_count(form, weight) for weight in capped)
        sharing = [weight for weight in sharing if weight.name not in ranks]
    return ranks


def sensitivity_ranks(weights: Sequence[Weight], losses: Mapping[str, Floats], limit: int) -> Ranks:
    """ASVD (arXiv 2312.05821, section 3.3): every weight takes its smallest rank that loses at most one threshold.

    The threshold is the least one at which the parameters keep the limit. A weight stays dense where even its largest
    rank loses more. Where no threshold is high enough, every weight takes its smallest rank, and the limit is exceeded.

    Args:
        losses: by weight name, ranks and the loss of the model in which that weight alone has each, ``(ranks, 2)``.
        limit: parameters of all weights.
    """

    def ranks_at(threshold: float) -> Ranks:
        ranks = {}
        for weight in weights:
            rank, loss = losses[weight.name].T
            ranks[weight.name] = int(rank[loss <= threshold].min(initial=LOW_RANK.full(weight)))
        return ranks

    def within(threshold: float) -> bool:
        ranks = ranks_at(threshold)
        return sum(_stored(weight, ranks[weight.name]) for weight in weights) <= limit

    thresholds = [-inf, *sorted({loss for weight in weights for loss in losses[weight.name][:, 1].tolist()})]
    index = bisect_left(thresholds, True, key=within)
    return ranks_at(thresholds[min(index, len(thresholds) - 1)])


def zero_sum_ranks(weights: Sequence[Weight], changes: Mapping[str, Floats], limit: int) -> Ranks:
    """ZS-SVD (arXiv 2602.02848): drop singular components one after the other until the limit is kept.

    Every weight offers its smallest component. The one with the smallest predicted change is taken among those that
    raise the loss, while the dropped ones are predicted to have lowered it, and else among those that lower it; from
    the other kind where there is none. A weight counts its dense parameters until a pair of its rank has fewer.

    Args:
        changes: by weight name, the predicted change of the loss by dropping each singular component, the largest
            singular value first; shape ``(full,)``.
        limit: parameters of all weights. Every weight keeps at least one component, even above the limit.
    """
    ranks = {weight.name: len(changes[weight.name]) for weight in weights}
    used, drift = sum(weight.params for weight in weights), 0.0
    raising: list[tuple[float, int]] = []
    lowering: list[tuple[float, int]] = []

    def offer(index: int) -> None:
        name = weights[index].name
        if ranks[name] > 1:
            change = float(changes[name][ranks[name] - 1])
            heappush(raising if change >= 0 else lowering, (abs(change), index))

    for index in range(len(weights)):
        offer(index)
    while used > limit and (raising or lowering):
        heap = (raising or lowering) if drift <= 0 else (lowering or raising)
        size, index = heappop(heap)
        weight = weights[index]
        rank = ranks[weight.name]
        ranks[weight.name] = rank - 1
        drift += size if heap is raising else -size
        used -= _stored(weight, rank) - _stored(weight, rank - 1)
        offer(index)
    return ranks


def _stored(weight: Weight, rank: int) -> int:
    return min(LOW_RANK.params(weight, rank), weight.params)


def most_important(
    weights: Sequence[Weight],
    scores: Mapping[str, float],
    start: Mapping[str, Chosen],
    ranks: Mapping[str, Ints],
    limit: int,
    window: int = WINDOW,
) -> dict[str, Chosen]:
    """The exact optimum of the importance objective, over the ranks in a window round the unaligned ones.

    Published: maximise ``sum_i s_i (|W_i| - |W_i*|)`` within the budget, with the parameters ``|W_i|`` of a candidate,
    ``|W_i*|`` at the unaligned rank, and the score ``s_i``. ``sum_i s_i (max |W_i| - |W_i|)`` has the same minimum.
    The objective is linear in the parameters, so the window decides and not the loss.

    Args:
        scores: by weight name, 0 or more.
        start: the unaligned form and dim of each weight; one that is dense there stays dense.
        ranks: the ranks allowed to each weight; without any in its window it takes the nearest, without any at all it
            stays dense.
        limit: parameters of all weights; a BudgetError if the smallest candidates take more.
    """
    choices = [_near(weight, start[weight.name], ranks[weight.name], window) for weight in weights]
    groups = []
    for weight, near in zip(weights, choices, strict=True):
        params = np.array([form_named(choice.form).params(weight, choice.dim) for choice in near], dtype=np.int64)
        short = (params.max() - params).astype(np.float64)
        groups.append(Group(weight.name, scores[weight.name] * short, params[:, None]))
    picked = knapsack(groups, [limit], names=["the parameter limit"]).choice
    return {weight.name: near[item] for weight, near, item in zip(weights, choices, picked, strict=True)}


def _near(weight: Weight, start: Chosen, ranks: Ints, window: int) -> list[Chosen]:
    if start.form == "dense" or len(ranks) == 0:
        full = form_named("dense").full(weight)
        return [Chosen("dense", full, full)]
    distance = np.abs(ranks - start.dim)
    near = ranks[distance <= max(window, int(distance.min()))]
    return [Chosen(start.form, rank, rank) for rank in near.tolist()]


# --- the rules ---


class Uniform(RankRule):
    """Every weight keeps the same fraction (SVD-LLM)."""

    name = "uniform"
    limits_cache = True

    def ranks(self, problem: Problem, weights: Sequence[Weight], form: Form, fraction: float, limit: int) -> Ranks:
        return uniform_ranks(weights, fraction, form)


class Fisher(RankRule):
    """Ranks in proportion to how much a weight's parameters matter (PaLU)."""

    name = "fisher"
    limits_cache = True

    def ranks(self, problem: Problem, weights: Sequence[Weight], form: Form, fraction: float, limit: int) -> Ranks:
        return fisher_ranks(weights, _scores(problem, weights, form), limit, form)


class ZeroSum(RankRule):
    """Components are dropped so that the predicted changes of the loss sum to about zero (ZS-SVD)."""

    name = needs = "zero-sum"

    def ranks(self, problem: Problem, weights: Sequence[Weight], form: Form, fraction: float, limit: int) -> Ranks:
        return zero_sum_ranks(weights, problem.measurements, limit)


class Sensitivity(RankRule):
    """One threshold on what truncating a weight alone loses (ASVD)."""

    name = needs = "sensitivity"

    def ranks(self, problem: Problem, weights: Sequence[Weight], form: Form, fraction: float, limit: int) -> Ranks:
        return sensitivity_ranks(weights, problem.measurements, limit)


class Importance(WeightRule):
    """Scores times parameters, over sound ranks near the uniform ones, solved exactly."""

    name = "importance"
    aligned = True

    def choose(self, problem: Problem, form: Form, fraction: float, limit: int) -> dict[str, Chosen]:
        weights, align, ranks = weights_of(problem), problem.recipe.space.align, {}
        uniform = at_ranks(weights, uniform_ranks(weights, fraction, form), None, form)
        step = step_of(form, align)
        for site in problem.sites:
            for index, weight in enumerate(site.weights):
                dims = np.arange(step, form.max_useful_dim(weight) + 1, step, dtype=np.int64)
                sound = problem.timing.sound(form, weight, dims, index in site.fused) if align else slice(None)
                ranks[weight.name] = dims[sound]
        return most_important(weights, _scores(problem, weights, form), uniform, ranks, limit)


def _scores(problem: Problem, weights: Sequence[Weight], form: Form) -> dict[str, float]:
    curves = curves_of(problem, form)
    return {weight.name: fisher_score(weight, curves[weight.name]) for weight in weights}
