"""Which kernels served a group of points: the one that does the arithmetic, and the kind that is the most common."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from gac.lab.studies.readings import Readings
from gac.lab.studies.records import percent
from gac.profiling.kernel_names import Kernel, describe
from gac.profiling.records import Launch, Point


def main_kernel(launches: Sequence[Launch]) -> Kernel | None:
    """The kernel that does the arithmetic; the first one where no name says so, None where none was recorded."""
    kernels = [describe(launch.name) for launch in launches]
    return next((kernel for kernel in kernels if kernel.main), kernels[0] if kernels else None)


def kind(kernel: Kernel) -> tuple[str, int | None, int | None]:
    """What tells kernels of different design apart: family, architecture, tier."""
    return kernel.family, kernel.architecture, kernel.tier


def words(kernel: Kernel) -> str:
    """Its kind in words, ``cutlass sm75 align1``; a short name where the kind is not known."""
    if kernel.family == "other":
        return kernel.label
    architecture = "" if kernel.architecture is None else f" sm{kernel.architecture}"
    return f"{kernel.family}{architecture}" + ("" if kernel.tier is None else f" align{kernel.tier}")


def serving(readings: Readings, points: Iterable[Point]) -> tuple[Kernel, float] | None:
    """A kernel of the kind that serves most of the points, and the kind's share; None where none was recorded."""
    found = [main_kernel(readings.launches(point)) for point in points]
    kernels = [kernel for kernel in found if kernel is not None]
    if not kernels:
        return None
    most, count = Counter(map(kind, kernels)).most_common(1)[0]
    return next(kernel for kernel in kernels if kind(kernel) == most), count / len(kernels)


def instead(readings: Readings, ours: Iterable[Point], aligned: Iterable[Point]) -> str:
    """Whether another kind of kernel serves ``ours`` than serves ``aligned``, in words."""
    found = serving(readings, ours), serving(readings, aligned)
    if found[0] is None or found[1] is None:
        return "kernels not recorded"
    (here, _), (there, _) = found[0], found[1]
    if kind(here) == kind(there):
        return f"the same kernel: {words(here)}"
    return f"another kernel: {words(here)} instead of {words(there)}"


def kernels_note(readings: Readings, groups: Mapping[str, Iterable[Point]]) -> tuple[str, ...]:
    """Which kernels served each named group of points; nothing where none was recorded."""
    found = {name: serving(readings, points) for name, points in groups.items()}
    parts = [
        f"{name} by {words(given[0])}" + (f" ({percent(given[1])} of them)" if given[1] < 1 else "")
        for name, given in found.items()
        if given is not None
    ]
    return (f"served: {', '.join(parts)}",) if parts else ()
