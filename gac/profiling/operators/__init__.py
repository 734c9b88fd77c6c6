"""The operators that can be timed, each module's ``OPERATORS``. A new module is named below.

The contract suites in ``tests/profiling/operators`` then run over its description and its runs.
"""

from functools import cache, partial

from gac.core.errors import ProfileError
from gac.core.operations import Operation
from gac.core.registry import Registry, check_contract
from gac.profiling.operators import attention, collectives, engine, experts, gemm, latent, memory
from gac.profiling.operators.base import ACTIVATIONS, ITEM_BYTES, Operator, Runner, stored_as
from gac.profiling.operators.stored import StoredRunner

_check = partial(check_contract, "operator", members=("axes", "dtypes", "run", "compare"), base=Operator)

_ATTENTIONS = [f"{backend}{mask}" for backend in ("flash", "efficient", "cudnn", "math") for mask in ("", "_causal")]
_NOT_PLANNED = {
    "copy": "copy:Copy",
    "low_rank_shared": "gemm:SharedLowRank",
    "int4_linear": "int4:Int4Linear",
    "int4_linear_dequantised": "int4:DequantisedInt4Linear",
    **{f"batched_gemm_{way}": f"gemm:{way.upper()}" for way in ("separate", "bucketed", "padded")},
    **{f"sdpa_{attention}": f"attention:{attention.upper()}" for attention in _ATTENTIONS},
}
"""Operators that describe a GPU, and that no plan looks up."""

_places = {name: f"gac_extensions.lab.operators.{place}" for name, place in _NOT_PLANNED.items()}
OPERATORS: Registry[Operator] = Registry("operator", _places, _check, ProfileError)

for _module in (gemm, attention, latent, memory, collectives, experts, engine):
    for _operator in _module.OPERATORS:
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


def work_of(operation: Operation, dtype: str) -> tuple[int, int]:
    """Return the FLOPs of an operation, and the fewest bytes that it moves."""
    operator, axes = OPERATORS.get(operation.operator), operation.axes
    return operator.flops(axes), operator.bytes(axes, dtype)


@cache
def runner_of(name: str, dtype: str = ACTIVATIONS) -> Runner:
    """Return what runs an operator: itself in numbers, and a runner for each scheme.

    Raises:
        ProfileError: there is no operator of this name, or no such scheme, or its weights are not stored in any.
    """
    operator = OPERATORS.get(name)
    if dtype in ITEM_BYTES:
        return operator
    scheme = stored_as(dtype)
    return operator.runner_in(scheme) or StoredRunner(operator, scheme)
