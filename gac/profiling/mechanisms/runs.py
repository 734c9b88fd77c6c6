"""What ran at two dims, step by step: the launches that do the arithmetic, set side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from gac.forms import Operation
from gac.profiling.mechanisms.kernels import Kernel, describe
from gac.profiling.mechanisms.waves import Gemm, gemms_of
from gac.profiling.records import Launch

_ORDINALS = ("first", "second", "third", "fourth")


@dataclass(frozen=True)
class Run:
    """One launch that does arithmetic, with the split-k reduction that may follow it, and its GEMM where known."""

    launch: Launch
    kernel: Kernel
    reduced: bool
    gemm: Gemm | None


@dataclass(frozen=True)
class Pair:
    """The same step of the operation at the collapsed dim and at its rescue."""

    step: str
    slow: Run
    fast: Run
    sm_count: int


def pairs_of(
    slow: Sequence[Launch],
    fast: Sequence[Launch],
    slow_at: Operation | None,
    fast_at: Operation | None,
    sm_count: int,
) -> list[Pair]:
    """The steps at a collapsed dim and at its rescue, in order, as far as both have them."""
    before, after = _runs(slow, slow_at), _runs(fast, fast_at)
    return [
        Pair(_step(place, len(before), old.kernel), old, new, sm_count)
        for place, (old, new) in enumerate(zip(before, after, strict=False))
    ]


def _runs(launches: Sequence[Launch], at: Operation | None) -> list[Run]:
    kernels = [describe(launch.name) for launch in launches]
    main = [index for index, kernel in enumerate(kernels) if kernel.main]
    gemms = gemms_of(at) if at is not None else ()
    known = len(gemms) == len(main)
    return [
        Run(
            launches[index],
            kernels[index],
            any(kernel.family == "split-k reduce" for kernel in kernels[index + 1 : end]),
            gemms[place] if known else None,
        )
        for place, (index, end) in enumerate(zip_longest(main, main[1:]))
    ]


def _step(place: int, count: int, kernel: Kernel) -> str:
    if kernel.role == "attention":
        return "attention"
    if count == 1:
        return "the GEMM"
    return f"the {_ORDINALS[place]} GEMM" if place < len(_ORDINALS) else f"GEMM {place + 1}"
