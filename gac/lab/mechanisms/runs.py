"""What ran at a dim, launch by launch, and the steps of an operation at two dims beside each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from gac.lab.mechanisms.waves import Gemm, Waves, gemms_of, read, waves_of
from gac.operations import Operation
from gac.profiling.kernel_names import Kernel, describe
from gac.profiling.records import Header, Launch

_ORDINALS = ("first", "second", "third", "fourth")


@dataclass(frozen=True)
class Run:
    """One kernel that was recorded at a dim.

    Attributes:
        launch: as it was recorded.
        kernel: what its name and grid tell.
        gemm: the GEMM that it computes; None where it computes none, or which is not known.
        waves: how the SMs work off its tiles; None where not known.
        reduced: whether a split-k reduction follows it.
    """

    launch: Launch
    kernel: Kernel
    gemm: Gemm | None
    waves: Waves | None
    reduced: bool


@dataclass(frozen=True)
class Pair:
    """The same step of the operation at two dims: the collapsed one and its rescue, or an edge and its sweet spot."""

    step: str
    slow: Run
    fast: Run


def runs_of(launches: Sequence[Launch], at: Operation, header: Header) -> tuple[Run, ...]:
    """The kernels recorded at an operation, in order."""
    kernels = [describe(launch.name) for launch in launches]
    gemms = gemms_of(at)
    known = iter(gemms if len(gemms) == sum(kernel.main for kernel in kernels) else ())
    found = []
    for place, launch in enumerate(launches):
        gemm = next(known, None) if kernels[place].main else None
        kernel = read(launch, gemm)
        rest = takewhile(lambda after: not after.main, kernels[place + 1 :])
        reduced = any(after.family == "split-k reduce" for after in rest)
        found.append(Run(launch, kernel, gemm, waves_of(launch, kernel, header, gemm), reduced))
    return tuple(found)


def pairs_of(slow: Sequence[Run], fast: Sequence[Run]) -> list[Pair]:
    """The steps that do the arithmetic at both dims, in order, as far as both have them."""
    before, after = ([run for run in runs if run.kernel.main] for runs in (slow, fast))
    return [
        Pair(_step(place, len(before), old.kernel), old, new)
        for place, (old, new) in enumerate(zip(before, after, strict=False))
    ]


def _step(place: int, count: int, kernel: Kernel) -> str:
    if kernel.role == "attention":
        return "attention"
    if count == 1:
        return "the GEMM"
    return f"the {_ORDINALS[place]} GEMM" if place < len(_ORDINALS) else f"GEMM {place + 1}"
