"""How others allocate: the rules that a plan is compared with. None of them keeps the budget by itself."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from gac.arrays import Floats
from gac.curves import LossCurve
from gac.forms import Form, form_named
from gac.models.weights import Weight

LOW_RANK = form_named("low_rank")


@dataclass(frozen=True)
class Allotted:
    """What a rule gives a weight.

    Attributes:
        form: the one that the rule gives, or ``dense``.
        dim: what is stored and run.
        rank: the dim whose loss it has; below ``dim`` where zeros pad it.
    """

    form: str
    dim: int
    rank: int


@dataclass(frozen=True)
class Rounding:
    """A way to bring a rank to a multiple of ``step``: ``nearest`` (a half goes up), ``down``, ``up`` or ``pad``.

    ``pad`` fills up with zeros: the dim of ``up`` with the loss of the rank itself. No rank goes below one step.
    """

    way: str
    step: int

    def dim(self, rank: int) -> int:
        return max(1, _STEPS[self.way](rank, self.step)) * self.step

    def __str__(self) -> str:
        return f"{self.way}{self.step}"


def _up(rank: int, step: int) -> int:
    return -(-rank // step)


_STEPS: Mapping[str, Callable[[int, int], int]] = MappingProxyType(
    {
        "nearest": lambda rank, step: (rank + step // 2) // step,
        "down": lambda rank, step: rank // step,
        "up": _up,
        "pad": _up,
    }
)
ROUNDINGS = tuple(_STEPS)


def count(form: Form, weight: Weight, dim: int) -> int:
    """What is shared out between the weights of a form: their parameters, or their numbers in the KV cache."""
    return form.params(weight, dim) if form.counts == "params" else form.cached(weight, dim)


def count_dense(form: Form, weight: Weight) -> int:
    """The same of the dense weight."""
    return weight.params if form.counts == "params" else form_named("dense").cached(weight, 1)


def uniform_ranks(weights: Sequence[Weight], budget: float, form: Form = LOW_RANK) -> dict[str, int]:
    """SVD-LLM's rule: every weight keeps the same fraction of its parameters, ``rank = int(m * n * ratio / (m + n))``.

    The ranks are as they fall, aligned to nothing (Wang et al., SVD-LLM, arXiv 2403.07378; its code rounds down).

    Args:
        budget: kept fraction of each weight's parameters (the paper's 1 - compression ratio), or of its KV cache where
            that is what the form counts.
    """
    return {weight.name: int(count_dense(form, weight) * budget / count(form, weight, 1)) for weight in weights}


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
        whole = sum(scores[weight.name] * count(form, weight, 1) for weight in sharing)
        each = max(left, 0) / whole if whole else 0.0
        shares = {weight.name: int(each * scores[weight.name]) for weight in sharing}
        capped = [weight for weight in sharing if shares[weight.name] > form.largest_useful(weight)]
        if not capped:
            return ranks | {name: max(1, share) for name, share in shares.items()}
        ranks |= {weight.name: form.full(weight) for weight in capped}
        left -= sum(count_dense(form, weight) for weight in capped)
        sharing = [weight for weight in sharing if weight.name not in ranks]
    return ranks


def sensitivity_ranks(weights: Sequence[Weight], probes: Mapping[str, Floats], limit: int) -> dict[str, int]:
    """ASVD's rule: one threshold for all weights, each of which takes its smallest rank that loses no more than that.

    The threshold is the least one at which the parameters keep the limit (ASVD, arXiv 2312.05821, section 3.3). A
    weight stays dense where even its largest rank loses more. Where no threshold is high enough, every weight takes its
    smallest rank, and the limit is exceeded.

    Args:
        probes: by weight name, ranks and the loss of the model in which that weight alone has each, ``(ranks, 2)``.
        limit: parameters of all weights together.

    Returns:
        A rank for every weight; the full one where it stays dense.
    """

    def ranks_at(threshold: float) -> dict[str, int]:
        found = {weight.name: probes[weight.name][probes[weight.name][:, 1] <= threshold, 0] for weight in weights}
        return {weight.name: int(found[weight.name].min(initial=LOW_RANK.full(weight))) for weight in weights}

    def used(threshold: float) -> int:
        ranks = ranks_at(threshold)
        return sum(min(LOW_RANK.params(weight, ranks[weight.name]), weight.params) for weight in weights)

    thresholds = [-inf, *sorted({loss for weight in weights for loss in probes[weight.name][:, 1].tolist()})]
    at = bisect_left(thresholds, True, key=lambda threshold: used(threshold) <= limit)
    return ranks_at(thresholds[min(at, len(thresholds) - 1)])


def allot(
    weights: Sequence[Weight], ranks: Mapping[str, int], rounding: Rounding | None = None, form: Form = LOW_RANK
) -> dict[str, Allotted]:
    """Form and dim of every weight from its rank, rounded where asked.

    A weight that the form would make no smaller, or that has no rank, stays dense.

    Args:
        ranks: by weight name.
    """
    dense = form_named("dense")
    allotted = {}
    for weight in weights:
        allotted[weight.name] = Allotted(dense.name, dense.full(weight), dense.full(weight))
        if weight.name not in ranks:
            continue
        rank = max(1, ranks[weight.name])
        dim = rounding.dim(rank) if rounding else rank
        if dim <= form.largest_useful(weight):
            padded = rounding is not None and rounding.way == "pad"
            allotted[weight.name] = Allotted(form.name, dim, rank if padded else dim)
    return allotted
