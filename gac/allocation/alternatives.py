"""What a site could have had instead: the candidates that come nearest to the one that was chosen."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gac.allocation.candidates import CandidateSet, candidate_of
from gac.arrays import Floats, Ints
from gac.plan import Candidate


def nearest(rows: CandidateSet, chosen: int, costs: Ints, prices: Sequence[float]) -> tuple[Candidate, ...]:
    """The best candidate with fewer parameters than the chosen one, and the best with more, where there are any.

    Best is the smallest loss with what is used priced at the multipliers of the certificate (a candidate's Lagrangian
    value). So what holds against these two holds all the more against every other candidate of the site.

    Args:
        rows: the site's candidates.
        chosen: which of them is the plan's.
        costs: under each limit, shape ``(len(rows), limits)``.
        prices: loss per unit of each limit.
    """
    priced = rows.loss + costs @ np.array(prices)
    sides = rows.params < rows.params[chosen], rows.params > rows.params[chosen]
    return tuple(candidate_of(rows, _smallest(priced, side)) for side in sides if side.any())


def _smallest(priced: Floats, side: NDArray[np.bool_]) -> int:
    places = np.flatnonzero(side)
    return int(places[np.argmin(priced[places])])
