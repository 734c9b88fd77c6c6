"""ZS-SVD's allocation: components of the whole model are dropped so that the predicted changes sum to about zero."""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from gac.arrays import Floats
from gac.forms import form_named
from gac.models.weights import Weight


def zero_sum_ranks(weights: Sequence[Weight], changes: Mapping[str, Floats], limit: int) -> dict[str, int]:
    """Ranks that are left when enough singular components have been dropped, one after the other.

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
    low_rank = form_named("low_rank")
    return low_rank.params(weight, rank) if rank <= low_rank.largest_useful(weight) else weight.params
