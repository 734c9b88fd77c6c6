"""Costs of a choice: named columns of integers. A new resource is one record more."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor, prod
from types import MappingProxyType

from gac.core.words import megabytes
from gac.core.workloads import Workload
from gac.forms import Form
from gac.forms.tensor_parallel import split_matrices
from gac.models.sites import Weight
from gac.schemes import Scheme


@dataclass(frozen=True)
class Cost:
    """A resource that follows from forms, schemes and dims; latencies are looked up in ``gac.allocation.latencies``.

    Attributes:
        name: of its column, in plans and on the command line.
        limit: the field of ``gac.plan.recipe.Limits`` that limits it.
        unit: of the integers, plural.
        label: of axes and titles.
        format: writes an amount for a reader.
        of_choice: the amount of one weight in a form and a scheme at a dim.
        axis: divisors and units of an axis, the largest first.
        priced: an amount in words that its price is quoted for, and that amount.
        on_gpu: the amount that one of several GPUs has of a weight; the last argument is their number.
    """

    name: str
    limit: str
    unit: str
    label: str
    format: Callable[[int], str]
    of_choice: Callable[[Form, Scheme, Weight, int], int]
    axis: tuple[tuple[float, str], ...]
    priced: tuple[str, float]
    on_gpu: Callable[[Form, Scheme, Weight, int, int], int]

    @property
    def of_weights(self) -> bool:
        """True where the targeted weights take it, False where the KV cache does."""
        return self.label == self.unit

    def scale(self, largest: float) -> tuple[float, str]:
        """The divisor of amounts on an axis that reaches so far, and the unit that it makes of them."""
        return next((scale for scale in self.axis if largest >= scale[0]), self.axis[-1])


def _bytes(scheme: Scheme, matrices: Iterable[tuple[int, int]]) -> int:
    return sum(scheme.bytes(*shape) for shape in matrices)


def _plain(amount: int) -> str:
    return f"{amount:,}"


_RECORDS = (
    Cost(
        "params",
        limit="params",
        unit="parameters",
        label="parameters",
        format=_plain,
        of_choice=lambda form, scheme, weight, dim: form.params(weight, dim),
        axis=((1e9, "billions"), (1e6, "millions")),
        priced=("a million parameters", 1e6),
        on_gpu=lambda form, scheme, weight, dim, gpus: sum(map(prod, split_matrices(form, weight, dim, gpus))),
    ),
    Cost(
        "bytes",
        limit="memory",
        unit="bytes",
        label="bytes",
        format=megabytes,
        of_choice=lambda form, scheme, weight, dim: _bytes(scheme, form.matrices(weight, dim)),
        axis=((1e9, "GB"), (1e6, "MB")),
        priced=("a million bytes", 1e6),
        on_gpu=lambda form, scheme, weight, dim, gpus: _bytes(scheme, split_matrices(form, weight, dim, gpus)),
    ),
    Cost(
        "kv_numbers",
        limit="kv_cache",
        unit="numbers a token",
        label="KV cache",
        format=_plain,
        of_choice=lambda form, scheme, weight, dim: form.cached(weight, dim),
        axis=((1, "numbers a token"),),
        priced=("a number in the KV cache", 1.0),
        on_gpu=lambda form, scheme, weight, dim, gpus: form.cached(weight, dim) // weight.parts(gpus),
    ),
)
COSTS: Mapping[str, Cost] = MappingProxyType({cost.name: cost for cost in _RECORDS})
"""By column: the parameters of the targeted weights, their bytes, and what the KV cache keeps of a token, in numbers of
16 bits. A frontier may limit each of them."""

PARAMS, BYTES, KV_NUMBERS = COSTS


def column_of(limit: str) -> str:
    """The column that a frontier limits: one of ``COSTS``, or the latency of a workload."""
    return limit if limit in COSTS else ns_of(limit)


def ns_of(workload: object) -> str:
    """The column of a workload's latency in ns."""
    return f"ns:{workload}"


def columns_of(workloads: Sequence[Workload]) -> tuple[str, ...]:
    """All columns of candidates whose latency is looked up for these workloads, in their order."""
    return (*COSTS, *map(ns_of, workloads))


def floored(fraction: float, total: int) -> int:
    """``floor(fraction * total)`` in exact integers.

    The fraction counts as the decimal that it prints as: 0.8 is eight tenths, not the nearest double.

    >>> floored(0.8, 106168320), floored(0.29, 100), int(0.29 * 100)
    (84934656, 29, 28)
    """
    return floor(Fraction(repr(float(fraction))) * total)
