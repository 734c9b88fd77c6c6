"""What ran at two dims, step by step: the launches that do the arithmetic, paired."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from gac.lab.mechanisms.waves import Gemm, Waves, gemms_of, read, waves_of
from gac.operations import Operation
from gac.profiling.kernel_names import Kernel, describe
from gac.profiling.records import Header, Launch

_ORDINALS = ("first", "second", "third", "fourth")


@dataclass(frozen=True)
class Run:
    """One launch that does arithmetic, with the split-k reduction that may follow it; GEMM and waves where known."""

    launch: Launch
    kernel: Kernel
    reduced: bool
    gemm: Gemm | None
    waves: Waves | None


@dataclass(frozen=True)
class Pair:
    """The same step of the operation at two dims: the collapsed one and its rescue, or an edge and its sweet spot."""

    step: str
    slow: Run
    fast: Run


def pairs_of(
    slow: Sequence[Launch],
    fast: Sequence[Launch],
    slow_at: Operation | None,
    fast_at: Operation | None,
    header: Header,
) -> list[Pair]:
    """The steps at both dims, in order, as far as both have them."""
    before, after = _runs(slow, slow_at, header), _runs(fast, fast_at, header)
    return [
        Pair(_step(place, len(before), old.kernel), old, new)
        for place, (old, new) in enumerate(zip(before, after, strict=False))
    ]


def _runs(launches: Sequence[Launch], at: Operation | None, header: Header) -> list[Run]:
    kernels = [describe(launch.name) for launch in launches]
    main = [index for index, kernel in enumerate(kernels) if kernel.main]
    gemms = gemms_of(at) if at is not None else ()
    known = gemms if len(gemms) == len(main) else (None,) * len(main)
    reduced = [
        any(kernel.family == "split-k reduce" for kernel in kernels[index + 1 : end])
        for index, end in zip_longest(main, main[1:])
    ]
    return [_run(launches[index], added, gemm, header) for index, added, gemm in zip(main, reduced, known, strict=True)]


def _run(launch: Launch, reduced: bool, gemm: Gemm | None, header: Header) -> Run:
    kernel = read(launch, gemm)
    return Run(launch, kernel, reduced, gemm, waves_of(launch, kernel, header, gemm))


def _step(place: int, count: int, kernel: Kernel) -> str:
    if kernel.role == "attention":
        return "attention"
    if count == 1:
        return "the GEMM"
    return f"the {_ORDINALS[place]} GEMM" if place < len(_ORDINALS) else f"GEMM {place + 1}"
