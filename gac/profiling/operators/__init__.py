"""The operators that can be timed, as descriptions: axes, operands, FLOPs, bytes, and the shapes that are refused.

An operator is added by deriving from ``Operator``, naming its runner, and adding it here; the contract suites in
``tests/profiling/operators`` and ``tests/profiling/timing/runners`` then run over both.
"""

from dataclasses import replace

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
    TritonLinear,
    TritonLowRank,
)
from gac.profiling.operators.int4 import DequantisedInt4Linear, Int4Linear
from gac.profiling.operators.latent import LatentAttention
from gac.profiling.operators.rounding import RoundInputs
from gac.runtime.latent_words import LARGEST
from gac.schemes import SCHEMES

__all__ = [
    "ACTIVATIONS",
    "ITEM_BYTES",
    "OPERATORS",
    "Axes",
    "Operand",
    "Operator",
    "numbers_of",
    "operation",
    "stored_as",
    "with_decode_kernel",
]


def _check(own: object) -> None:
    check_contract("operator", own, ("axes", "dtypes", "runner"), Operator)


OPERATORS: Registry[Operator] = Registry("operator", {}, _check, ProfileError)

for _operator in (
    Linear(),
    RowwiseLinear(),
    TritonLinear(),
    LowRank(),
    TritonLowRank(),
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


def with_decode_kernel(operation: Operation, dtype: str = ACTIVATIONS) -> Operation:
    """What runs instead where GEMMs of one row run in Triton (``gac.runtime.decode_kernel``); else the operation."""
    in_triton = f"{operation.operator}_triton"
    runs = in_triton in OPERATORS.names and operation.axes["m"] == 1 and OPERATORS.get(in_triton).takes(dtype)
    return replace(operation, operator=in_triton) if runs else operation
