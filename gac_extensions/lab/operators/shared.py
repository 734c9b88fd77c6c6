"""Low-rank pairs that share their first GEMM, as one operator."""

from gac.profiling.operators.base import Axes, AxisSweep, Operand, around
from gac.profiling.operators.gemm import LowRank

_SHARED = {*range(32, 1025, 32), *around(512, 4)}


class SharedLowRank(LowRank):
    """Low-rank pairs of one input: ``hidden = x[m, k] @ A[pairs * r, k].T``, then each slice of r columns @ B[n, r].T.

    It writes the hidden activations, then the result of every pair.
    """

    name = "low_rank_shared"
    stored = False
    axes = ("m", "k", "r", "n", "pairs")
    reads = writes = ()
    products = ("m k r pairs", "m r n pairs")
    pair_of = None
    general = tuple(  # as q/k/v and gate/up can
        AxisSweep("r", _SHARED, {"m": m, "k": 4096, "n": n, "pairs": pairs})
        for m in (1, 1024)
        for n, pairs in ((1024, 3), (4096, 2))
    )

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        m, k, r, n, pairs = (axes[name] for name in self.axes)
        return Operand((m, k), dtype), Operand((pairs * r, k), dtype), *[Operand((n, r), dtype)] * pairs

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        m, _k, r, n, pairs = (axes[name] for name in self.axes)
        return Operand((m, pairs * r), dtype), *[Operand((m, n), dtype)] * pairs
