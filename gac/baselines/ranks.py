"""How others allocate: the rules that a plan is compared with. None of them keeps the budget by itself."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import inf

from gac.core.arrays import Floats
from gac.forms import Form, form_named
from gac.forms.loss_curves import LossCurve
from gac.models.sites import Weight

LOW_RANK = form_named("low_rank")


def _count(form: Form, weight: Weight, dim: int) -> int:
    """What is shared out between the weights of a form: their parameters, or their numbers in the KV cache."""
    return form.params(weight, dim) if form.rule_resource == "params" else form.cache.numbers(weight, dim)


def _count_dense(form: Form, weight: Weight) -> int:
    """The same of the dense weight."""
    return weight.params if form.rule_resource == "params" else weight.cached_numbers


def uniform_ranks(weights: Sequence[Weight], budget: float, form: Form = LOW_RANK) -> dict[str, int]:
    """SVD-LLM's rule: every weight keeps the same fraction of its parameters, ``rank = int(m * n * ratio / (m + n))``.

    The ranks are as they fall, aligned to nothing (Wang et al., SVD-LLM, arXiv 2403.07378; its code rounds down).

    Args:
        budget: kept fraction of each weight's parameters (the paper's 1 - compression ratio), or of its KV cache where
            that is what the form counts.
    """
    return {weight.name: int(_count_dense(form, weight) * budget / _count(form, weight, 1)) for weight in weights}


def fisher_score(weight: Weight, curve: LossCurve) -> float:
    """How much a parameter of the weight matters: what losing the whole weight costs, over its parameters.

    PaLU scores a weight with the mean over its entries of the root of the mean squared gradient (Chang et al., PaLU,
    arXiv 2407.21118). From a loss curve the nearest to it is the loss at rank 0, with the curvature of K-FAC
    ``1/2 tr(G W A W^T)``: squared gradients too, but weighed by the squared weights, and without the root.
    """
    return float(curve.loss[0]) / weight.params


def fisher_ranks(
    weights: Sequence[Weight], scores: Mapping[str, float], limit: int, form: Form = LOW_RANK
) -> dict[str, int]:
    """PaLU's rule: ranks in proportion to the scores, rounded down, as many as the limit allows.

    PaLU shares out ranks between groups of heads of one shape, ``rank_i = total * F_i / sum(F)``, and caps them (arXiv
    2407.21118). Here shapes may differ, so what the form counts is shared out: ``rank_i = floor(t F_i)`` with ``t``
    such that the weights take ``limit`` together. A weight that its form would make no smaller is capped: it stays
    dense, and the others share what it leaves.

    Args:
        scores: by weight name, 0 or more (``fisher_score``).
        limit: parameters of all weights together, or their numbers in the KV cache where the form counts those.

    Returns:
        A rank of 1 or more for every weight; above ``largest_useful`` where it stays dense.
    """
    ranks: dict[str, int] = {}
    left, sharing = limit, list(weights)
    while sharing:
        whole = sum(scores[weight.name] * _count(form, weight, 1) for weight in sharing)
        each = max(left, 0) / whole if whole else 0.0
        shares = {weight.name: int(each * scores[weight.name]) for weight in sharing}
        capped = [weight for weight in sharing if shares[weight.name] > form.max_useful_dim(weight)]
        if not capped:
            return ranks | {name: max(1, share) for name, share in shares.items()}
        ranks |= {weight.name: form.full(weight) for weight in capped}
        left -= sum(_count_dense(form, weight) for weight in capped)
        sharing = [weight for weight in sharing if weight.name not in ranks]
    return ranks


def sensitivity_ranks(weights: Sequence[Weight], losses: Mapping[str, Floats], limit: int) -> dict[str, int]:
    """ASVD's rule: one threshold for all weights, each of which takes its smallest rank that loses no more than that.

    The threshold is the least one at which the parameters keep the limit (ASVD, arXiv 2312.05821, section 3.3). A
    weight stays dense where even its largest rank loses more. Where no threshold is high enough, every weight takes its
    smallest rank, and the limit is exceeded.

    Args:
        losses: by weight name, ranks and the loss of the model in which that weight alone has each, ``(ranks, 2)``.
        limit: parameters of all weights together.

    Returns:
        A rank for every weight; the full one where it stays dense.
    """

    def ranks_at(threshold: float) -> dict[str, int]:
        found = {weight.name: losses[weight.name][losses[weight.name][:, 1] <= threshold, 0] for weight in weights}
        return {weight.name: int(found[weight.name].min(initial=LOW_RANK.full(weight))) for weight in weights}

    def used(threshold: float) -> int:
        ranks = ranks_at(threshold)
        return sum(min(LOW_RANK.params(weight, ranks[weight.name]), weight.params) for weight in weights)

    thresholds = [-inf, *sorted({loss for weight in weights for loss in losses[weight.name][:, 1].tolist()})]
    at = bisect_left(thresholds, True, key=lambda threshold: used(threshold) <= limit)
    return ranks_at(thresholds[min(at, len(thresholds) - 1)])


def zero_sum_ranks(weights: Sequence[Weight], changes: Mapping[str, Floats], limit: int) -> dict[str, int]:
    """ZS-SVD's rule: the ranks that are left when enough singular components have been dropped, one after the other.

    Every weight offers its smallest component. Taken is the one with the smallest predicted change among those that
    raise the loss, where what was dropped so far is predicted to have lowered it or left it, and among those that lower
    it otherwise; from the other kind where there is none (Abbasi et al., Zero Sum SVD, arXiv 2602.02848). Parameters
    count as they are stored: a weight takes its dense ones until a pair of its rank has fewer.

    Args:
        changes: by weight name, the predicted change of the loss by dropping each singular component, the largest
            singular value first; shape ``(full,)``.
        limit: parameters of all weights together. Every weight keeps at least one component, so that a limit below
            those is not met.

    Returns:
        A rank for every weight; above ``largest_useful`` where it stays dense.
    """
    ranks = {weight.name: len(changes[weight.name]) for weight in weights}
    used, drift = sum(weight.params for weight in weights), 0.0
    raising: list[tuple[float, int]] = []
    lowering: list[tuple[float, int]] = []
    for at, weight in enumerate(weights):
        if ranks[weight.name] > 1:
            _offer(float(changes[weight.name][-1]), at, raising, lowering)
    while used > limit and (raising or lowering):
        heap = (raising or lowering) if drift <= 0 else (lowering or raising)
        size, at = heappop(heap)
        weight = weights[at]
        rank = ranks[weight.name]
        ranks[weight.name] = rank - 1
        drift += size if heap is raising else -size
        used -= _stored(weight, rank) - _stored(weight, rank - 1)
        if rank > 2:  # one component stays
            _offer(float(changes[weight.name][rank - 2]), at, raising, lowering)
    return ranks


def _offer(change: float, at: int, raising: list[tuple[float, int]], lowering: list[tuple[float, int]]) -> None:
    heappush(raising if change >= 0 else lowering, (abs(change), at))


def _stored(weight: Weight, rank: int) -> int:
    """Parameters of a weight that keeps this rank, in the smaller form."""
    return min(LOW_RANK.params(weight, rank), weight.params)
