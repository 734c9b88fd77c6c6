"""What a choice costs: named columns of integers. A new resource is one function more."""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType

from gac.core.workloads import Workload
from gac.forms import Form
from gac.models.sites import Weight
from gac.schemes import Scheme

PARAMS, BYTES, KV_NUMBERS = "params", "bytes", "kv_numbers"

COSTS: Mapping[str, Callable[[Form, Scheme, Weight, int], int]] = MappingProxyType(
    {
        PARAMS: lambda form, scheme, weight, dim: form.params(weight, dim),
        BYTES: lambda form, scheme, weight, dim: sum(scheme.bytes(*one) for one in form.latency.matrices(weight, dim)),
        KV_NUMBERS: lambda form, scheme, weight, dim: form.cache.numbers(weight, dim),
    }
)
"""What one weight costs in a form and a scheme at a dim, by column: its parameters, their bytes, and what the KV cache
keeps of a token, in numbers of 16 bits. Latencies are looked up, see ``gac.allocation.latencies``."""


COUNTED = PARAMS, BYTES, KV_NUMBERS
"""Costs that a frontier may limit besides latencies: they follow from dims and schemes alone."""


def column_of(limit: str) -> str:
    """The column that a frontier limits: one of ``COUNTED``, or the latency of a workload."""
    return limit if limit in COUNTED else ns_of(limit)


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
    return math.floor(Fraction(repr(float(fraction))) * total)
