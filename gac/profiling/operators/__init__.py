"""The operators that can be timed, as descriptions: axes, operands, FLOPs, bytes, and the shapes that are refused.

An operator is added by deriving from ``Operator``, naming its runner, and adding it here; the contract suites in
``tests/profiling/operators`` and ``tests/profiling/timing/runners`` then run over both.
"""

from gac.core.errors import ProfileError
from gac.core.operations import Operation
from gac.core.registry import Registry, check_contract
from gac.profiling.operators.attention import BACKENDS, Sdpa
from gac.profiling.operators.base import ACTIVATIONS, ITEM_BYTES, Axes, Operand, Operator, numbers_of, stored_as
from gac.profiling.operators.batched import BatchedGemm, Heads
from gac.profiling.operators.collectives import AllGather, AllReduce, ReduceScatter
from gac.profiling.operators.gemm import (
    Copy,
    Linear,
    LowRank,
    RowwiseLinear,
    SharedLowRank,
)
from gac.profiling.operators.int4 import DequantisedInt4Linear, Int4Linear
from gac.profiling.operators.latent import LatentAttention
from gac.profiling.operators.rounding import NUMBERS, RoundInputs, rounded_to
from gac.runtime.limits import LARGEST

__all__ = [
    "ACTIVATIONS",
    "ITEM_BYTES",
    "OPERATORS",
    "Axes",
    "Operand",
    "Operator",
    "numbers_of",
    "operation",
    "rounded_to",
    "stored_as",
]


def _check(own: object) -> None:
    check_contract("operator", own, ("axes", "dtypes", "runner"), Operator)


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
    *map(RoundInputs, NUMBERS),
    Copy(),
    AllReduce(),
    AllGather(),
    ReduceScatter(),
):
    OPERATORS.register(_operator)


def operation(name: str, **axes: int) -> Operation:
    """One shape of an operator, its axes in the operator's order.

    Raises:
        ProfileError: the operator is unknown, an axis is missing, unknown or below 1, or the sizes do not go together.
    """
    operator = OPERATORS.get(name)
    given = f"{name} with {', '.join(f'{axis}={size}' for axis, size in axes.items()) or 'no axes'}"
    if set(axes) != set(operator.axes):
        raise ProfileError(given, f"the axes {', '.join(operator.axes)}", "Give every axis of the operator a size.")
    if any(size < 1 for size in axes.values()):
        raise ProfileError(given, "sizes of at least 1", "Correct the sizes.")
    unmet = operator.unmet(axes)
    if unmet is not None:
        raise ProfileError(given, unmet, "Correct the sizes.")
    return Operation(name, tuple((axis, axes[axis]) for axis in operator.axes))
