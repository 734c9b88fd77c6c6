"""Costs of a choice: named columns of integers. A new resource is one record more, and a field of ``Limits``."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor, inf, nextafter, prod
from types import MappingProxyType

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
        label: of axes and titles; the unit where the targeted weights take it, else what takes it.
        of_choice: the amount of one weight in a form and a scheme at a dim.
        on_gpu: the amount that one of several GPUs has of a weight; the last argument is their number.
        million, billion: names of large amounts on an axis; empty where amounts are small.
        help: of the option ``--LIMIT``; empty for parameters, whose option is ``--budget``.
    """

    name: str
    limit: str
    unit: str
    label: str
    of_choice: Callable[[Form, Scheme, Weight, int], int]
    on_gpu: Callable[[Form, Scheme, Weight, int, int], int]
    million: str = ""
    billion: str = ""
    help: str = ""

    @property
    def of_weights(self) -> bool:
        """True where the targeted weights take it, False where the KV cache does."""
        return self.label == self.unit

    @property
    def priced(self) -> tuple[str, float]:
        """The amount that its price is quoted for, in words and as a number."""
        if self.million:
            return f"a million {self.unit}", 1e6
        owner = "" if self.of_weights else f"{self.label}'s "
        return f"one of the {owner}{self.unit}", 1.0

    def scale(self, largest: float) -> tuple[float, str]:
        """The divisor of amounts on an axis that reaches so far, and the unit that it makes of them."""
        if not self.million:
            return 1, self.unit
        return (1e9, self.billion) if largest >= 1e9 else (1e6, self.million)


def _bytes(scheme: Scheme, matrices: Iterable[tuple[int, int]]) -> int:
    return sum(scheme.bytes(*shape) for shape in matrices)


_COSTS = (
    Cost(
        "params",
        limit="params",
        unit="parameters",
        label="parameters",
        million="millions",
        billion="billions",
        of_choice=lambda form, scheme, weight, dim: form.params(weight, dim),
        on_gpu=lambda form, scheme, weight, dim, gpus: sum(map(prod, split_matrices(form, weight, dim, gpus))),
    ),
    Cost(
        "bytes",
        limit="memory",
        unit="bytes",
        label="bytes",
        million="MB",
        billion="GB",
        help="Kept bytes, likewise: 0.5, or 6GB (MB, GiB, ...) of the whole model.",
        of_choice=lambda form, scheme, weight, dim: _bytes(scheme, form.latency.matrices(weight, dim)),
        on_gpu=lambda form, scheme, weight, dim, gpus: _bytes(scheme, split_matrices(form, weight, dim, gpus)),
    ),
    Cost(
        "kv_numbers",
        limit="kv_cache",
        unit="numbers a token",
        label="KV cache",
        help="Allowed fraction of the dense KV cache; needs --form kv_bits, latent or head_dim.",
        of_choice=lambda form, scheme, weight, dim: form.cache.numbers(weight, dim),
        on_gpu=lambda form, scheme, weight, dim, gpus: form.cache.numbers(weight, dim) // weight.parts(gpus),
    ),
)
COSTS: Mapping[str, Cost] = MappingProxyType({cost.name: cost for cost in _COSTS})
"""By column: the parameters of the targeted weights, their bytes, and what the KV cache keeps of a token, in numbers of
16 bits. A frontier may limit each of them."""

PARAMS, BYTES, KV_NUMBERS, *_ = COSTS


def ns_of(workload: object) -> str:
    return f"ns:{workload}"


def columns_of(workloads: Sequence[Workload]) -> tuple[str, ...]:
    return (*COSTS, *map(ns_of, workloads))


def fraction_of(allowed: int, total: int) -> float:
    """The fraction of ``total`` that ``floored`` turns into exactly ``allowed``, of 1 to ``total``.

    >>> floored(fraction_of(7, 106168320), 106168320)
    7
    """
    fraction = allowed / total
    while (reached := floored(fraction, total)) != allowed:
        fraction = nextafter(fraction, inf if reached < allowed else 0)
    return fraction


def floored(fraction: float, total: int) -> int:
    """``floor(fraction * total)`` in exact integers.

    The fraction counts as the decimal that it prints as: 0.8 is eight tenths, not the nearest double.

    >>> floored(0.8, 106168320), floored(0.29, 100), int(0.29 * 100)
    (84934656, 29, 28)
    """
    return floor(Fraction(repr(float(fraction))) * total)
