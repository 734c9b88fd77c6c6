"""The shapes that describe a GPU generally: the sweeps that each operator declares."""

from collections.abc import Iterator, Sequence

from gac.core.operations import Operation
from gac.profiling.operators import OPERATORS, Operator, operation
from gac.profiling.operators.base import AxisSweep
from gac.profiling.records import Cache, Point
from gac.profiling.sweeps.coverage import check_dtype, measured_schemes

FP8_SINCE = (8, 9)

_CACHES: tuple[Cache, ...] = ("cold", "hot")


def general_points(
    dtype: str = "bf16", compute_capability: tuple[int, int] = (9, 0), schemes: Sequence[str] = ()
) -> tuple[Point, ...]:
    """List about 5,000 points that describe a GPU: every operator along the axes that compression changes.

    Args:
        dtype: ``bf16`` or ``fp16``, of everything but the INT4 operators (bf16) and the fp8 ones.
        compute_capability: fp8 is timed from (8, 9) on.
        schemes: time GEMMs in these too, at the shapes that each runs.

    Raises:
        PlanError: a scheme is unknown.
        ProfileError: the dtype is neither, or no operator of a scheme can be timed.
    """
    check_dtype(dtype)
    sweeps = [(operator, sweep) for operator in OPERATORS for sweep in operator.general]
    points = [
        Point(shape, sweep.dtype or dtype, cache)
        for operator, sweep in sweeps
        if sweep.dtype != "fp8" or compute_capability >= FP8_SINCE
        for cache in _CACHES[: 1 + sweep.hot]
        for shape in _shapes(operator, sweep)
    ]
    points += [
        Point(shape, scheme.dtype)
        for scheme in measured_schemes(schemes)
        for operator, sweep in sweeps
        if sweep.dtype is None and operator.takes(scheme.dtype)
        for shape in _shapes(operator, sweep)
        if operator.refusal(shape.axes, scheme.dtype) is None
    ]
    return tuple(dict.fromkeys(points))


def _shapes(operator: Operator, sweep: AxisSweep) -> Iterator[Operation]:
    yield from (operation(operator.name, **sweep.fixed, **{sweep.axis: dim}) for dim in sorted(sweep.dims))
