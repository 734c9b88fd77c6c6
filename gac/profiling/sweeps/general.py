"""The shapes that describe a GPU generally: the sweeps that each operator declares."""

from collections.abc import Iterator, Sequence

from gac.profiling.operators import OPERATORS, Operator, operation
from gac.profiling.operators.base import AxisSweep
from gac.profiling.records import Point
from gac.profiling.sweeps.coverage import check_dtype, measured_schemes

FP8_SINCE = (8, 9)


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
    dtypes = (dtype, *(scheme.dtype for scheme in measured_schemes(schemes)))
    points = [
        point
        for operator in OPERATORS
        for sweep in operator.general
        if sweep.dtype != "fp8" or compute_capability >= FP8_SINCE
        for point in _points(operator, sweep, dtypes)
    ]
    return tuple(dict.fromkeys(points))


def _points(operator: Operator, sweep: AxisSweep, dtypes: Sequence[str]) -> Iterator[Point]:
    for dim in sorted(sweep.dims):
        shape = operation(operator.name, **sweep.fixed, **{sweep.axis: dim})
        if sweep.dtype is not None:
            yield Point(shape, sweep.dtype)
            continue
        yield Point(shape, dtypes[0])
        if sweep.hot:
            yield Point(shape, dtypes[0], "hot")
        yield from (
            Point(shape, dtype)
            for dtype in dtypes[1:]
            if operator.takes(dtype) and operator.refusal(shape.axes, dtype) is None
        )
