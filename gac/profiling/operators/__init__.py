"""The operators that can be timed. Adding one takes a subclass of ``Operator`` in a file here, and a line below.

The contract suites in ``tests/profiling/operators`` then run over its description and its runs.
"""

from functools import cache

from gac.core.errors import ProfileError
from gac.core.operations import Operation
from gac.core.registry import Registry, check_contract
from gac.profiling.operators.attention import BACKENDS, Sdpa
from gac.profiling.operators.base import (
    ACTIVATIONS,
    ITEM_BYTES,
    WORST_ERROR,
    Axes,
    Operand,
    Operator,
    Runner,
    numbers_of,
    relative_error,
    stored_as,
)
from gac.profiling.operators.collectives import AllGather, AllReduce, ReduceScatter
from gac.profiling.operators.gemm import BatchedGemm, Copy, Heads, Linear, LowRank, RowwiseLinear, SharedLowRank
from gac.profiling.operators.int4 import DequantisedInt4Linear, Int4Linear
from gac.profiling.operators.latent import LatentAttention
from gac.profiling.operators.rounding import RoundInputs
from gac.runtime.limits import LARGEST
from gac.schemes import SCHEMES

__all__ = [
    "ACTIVATIONS",
    "ITEM_BYTES",
    "OPERATORS",
    "WORST_ERROR",
    "Axes",
    "Operand",
    "Operator",
    "Runner",
    "numbers_of",
    "operation",
    "relative_error",
    "rounded_to",
    "runner_of",
    "stored_as",
]


def _check(operator: object) -> None:
    check_contract("operator", operator, ("axes", "dtypes", "run", "compare"), Operator)


OPERATORS: Registry[Operator] = Registry("operator", {}, _check, ProfileError)

for _operator in (
    Linear(),
    RowwiseLinear(),
    LowRank(),
    SharedLowRank(),
    BatchedGemm(),
    Heads("separate"),
    Heads("bucketed"),
    Heads("padded"),
    Int4Linear(),
    DequantisedInt4Linear(),
    *(Sdpa(backend, causal) for backend in BACKENDS for causal in (False, True)),
    LatentAttention(),
    *map(LatentAttention, LARGEST),
    *(
        RoundInputs(scheme.input_quantiser, scheme.input_dtype)
        for scheme in SCHEMES
        if scheme.input_quantiser and scheme.input_dtype
    ),
    Copy(),
    AllReduce(),
    AllGather(),
    ReduceScatter(),
):
    OPERATORS.register(_operator)


def operation(name: str, **axes: int) -> Operation:
    """Make one shape of an operator, its axes in the operator's order.

    Raises:
        ProfileError: the operator is unknown, an axis is missing, unknown or below 1, or the sizes do not go together.
    """
    operator = OPERATORS.get(name)
    problem = f"{name} with {', '.join(f'{axis}={size}' for axis, size in axes.items()) or 'no axes'}"
    if set(axes) != set(operator.axes):
        raise ProfileError(problem, f"the axes {', '.join(operator.axes)}", "Give every axis of the operator a size.")
    unmet = "sizes of at least 1" if any(size < 1 for size in axes.values()) else operator.unmet(axes)
    if unmet is not None:
        raise ProfileError(problem, unmet, "Correct the sizes.")
    return Operation(name, tuple((axis, axes[axis]) for axis in operator.axes))


def runner_of(name: str, dtype: str = ACTIVATIONS) -> Runner:
    """Return what runs an operator: itself in numbers, and a runner for each scheme.

    Raises:
        ProfileError: there is no operator of this name, or no such scheme, or its weights are not stored in any.
    """
    return OPERATORS.get(name) if dtype in ITEM_BYTES else _stored_runner(name, dtype)


@cache
def _stored_runner(name: str, dtype: str) -> Runner:
    from gac.profiling.operators.stored import StoredRunner

    return StoredRunner(OPERATORS.get(name), stored_as(dtype))
