"""Collectives: what the GPUs of a split model run together, each on rows and columns of activations."""

from gac.profiling.operators.base import Axes, Operand, Operator


class Collective(Operator):
    """One of several GPUs' part in a collective over ``m`` rows of ``n`` columns; latency follows their bytes.

    Operands are those of each GPU. FLOPs are none: what sums up is counted as bytes.
    """

    axes = ("gpus", "m", "n")
    smooth = True


class AllReduce(Collective):
    """``x[m, n]`` of every GPU becomes their sum, in its place, on each of them: a rowwise split GEMM's outputs."""

    name = "all_reduce"
    reads, writes = ("m n",), ("m n",)
    runner = "gac.profiling.timing.runners.collectives:AllReduceRunner"


class AllGather(Collective):
    """``x[m, n / gpus]`` of every GPU becomes ``x[m, n]`` on each: all columns of a colwise split GEMM side by side.

    What arrives GPU by GPU, ``[gpus, m, n / gpus]``, is copied into rows where there are several.
    """

    name = "all_gather"
    runner = "gac.profiling.timing.runners.collectives:AllGatherRunner"

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        return (Operand((axes["m"], axes["n"] // axes["gpus"]), dtype),)

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        gpus, m, n = (axes[name] for name in self.axes)
        return Operand((gpus, m, n // gpus), dtype), Operand((m, n), dtype)

    def unmet(self, axes: Axes) -> str | None:
        return _uneven(axes)


class ReduceScatter(Collective):
    """``x[m, n]`` of every GPU becomes ``[m, n / gpus]`` on each: its own columns of their sum.

    They are copied column block by column block, ``[gpus, m, n / gpus]``, before they leave, where there are several
    rows.
    """

    name = "reduce_scatter"
    runner = "gac.profiling.timing.runners.collectives:ReduceScatterRunner"

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        return (Operand((axes["m"], axes["n"]), dtype),)

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        gpus, m, n = (axes[name] for name in self.axes)
        return Operand((gpus, m, n // gpus), dtype), Operand((m, n // gpus), dtype)

    def unmet(self, axes: Axes) -> str | None:
        return _uneven(axes)


def _uneven(axes: Axes) -> str | None:
    return "n that is a multiple of gpus" if axes["n"] % axes["gpus"] else None
