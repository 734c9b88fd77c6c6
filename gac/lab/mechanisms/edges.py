"""Why latency jumps at the edges of a staircase, from the kernels that were recorded before and after."""

from gac.lab.mechanisms.causes import Cause, cause_at, first_of, launches_at, operation_at, other_kernels
from gac.lab.mechanisms.runs import Pair, pairs_of
from gac.profiling.cliffs import Cliffs
from gac.profiling.records import Header
from gac.profiling.table import Sweep


def edge_causes(sweep: Sweep, cliffs: Cliffs, header: Header) -> tuple[Cause | None, ...]:
    """The cause of each jump from one of ``cliffs.sweet_spots`` to its edge, in order.

    Another kernel has the kinds that ``cause_of`` gives it (``kernel switch``, ``template``, ...); the same one in more
    waves is a ``wave``. ``slow`` is what ran at the edge, ``fast`` what ran at the sweet spot.

    Returns:
        None where the record does not tell.
    """
    pairs = zip(cliffs.sweet_spots.tolist(), cliffs.edges.tolist(), strict=True)
    return tuple(_edge(sweep, spot, edge, header) for spot, edge in pairs)


def _edge(sweep: Sweep, spot: int, edge: int, header: Header) -> Cause | None:
    before, after = launches_at(sweep, spot), launches_at(sweep, edge)
    if not before or not after:
        return None
    pairs = pairs_of(after, before, operation_at(sweep, edge), operation_at(sweep, spot), header)
    return other_kernels(after, before, pairs) or first_of(_more_waves, pairs)


def _more_waves(pair: Pair) -> Cause | None:
    """The same kernel in more waves; at least so many where an SM may hold several of its CTAs."""
    slow, fast = pair.slow.waves, pair.fast.waves
    if slow is None or fast is None or slow.count <= fast.count:
        return None
    bound = "" if slow.exact and fast.exact else "at least "
    evidence = (
        f"{pair.step} ran {pair.slow.kernel.label} in {bound}{slow.count} waves of {slow.at_once} instead of "
        f"{fast.count} ({slow.tiles} tiles instead of {fast.tiles})"
    )
    return cause_at("wave", pair, evidence)
