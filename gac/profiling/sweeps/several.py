"""Several GPUs of one host that measure one table: they have to be alike."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from msgspec.structs import replace

from gac.core.errors import ProfileError
from gac.profiling.records import DeviceLostError, Header, Point
from gac.profiling.sweeps.sweep import Measurer, sentinels_of

APART = 0.03
"""How much longer one GPU may take than another, beyond what its own timings differ by."""
TIMINGS = 5

_OF_ONE = frozenset({"device", "shared_with", "date", "others", "memory_bytes"})


def one_header(headers: Sequence[Header]) -> Header:
    """The first GPU's, which names the others and whoever uses any of them too.

    Raises:
        ProfileError: a GPU is of another kind, or set otherwise, than the first.
    """
    first, *others = headers
    for number, other in enumerate(others, 1):
        for name in sorted({*Header.__struct_fields__} - _OF_ONE):
            own, theirs = getattr(first, name), getattr(other, name)
            if own != theirs:
                raise ProfileError(
                    f"GPU {number} has {name} {theirs!r}, where GPU 0 has {own!r}",
                    "GPUs of one kind, set alike",
                    "Choose GPUs with CUDA_VISIBLE_DEVICES, or measure each into a file of its own.",
                )
    told = [f"GPU {number}: {one.shared_with}" for number, one in enumerate(headers) if one.shared_with]
    return replace(first, others=tuple(sorted(one.device for one in others)), shared_with="; ".join(told))


def check_agree(points: Sequence[Point], measurers: Sequence[Measurer]) -> None:
    """Time the sentinels of these points on every GPU at once, five times each.

    Raises:
        ProfileError: a GPU takes over 3 % longer for one each time than another ever does.
        ProfileError: a GPU has failed.
    """
    with ThreadPoolExecutor(len(measurers)) as threads:
        for point in sentinels_of(points):
            found = list(threads.map(partial(_timings, point), measurers))
            if all(found):
                _compare(point, found)


def _timings(point: Point, measurer: Measurer) -> list[float]:
    """Medians in ns; none where the point fails, as it will in the sweep."""
    try:
        rows = [measurer.measure(point)]
        if rows[0].error is None:
            rows += [measurer.measure(point, checked=True) for _ in range(1, TIMINGS)]
    except DeviceLostError as lost:
        raise ProfileError(f"a GPU failed at {lost.at}", "GPUs that go on", "Look at nvidia-smi.") from lost
    return [row.median_ns for row in rows if row.median_ns is not None]


def _compare(point: Point, found: Sequence[Sequence[float]]) -> None:
    slow, fast = (
        max(range(len(found)), key=lambda gpu: min(found[gpu])),
        min(range(len(found)), key=lambda gpu: max(found[gpu])),
    )
    apart = min(found[slow]) / max(found[fast]) - 1
    if apart > APART:
        axes = " ".join(f"{axis}={size}" for axis, size in point.operation.shape)
        raise ProfileError(
            f"GPU {slow} takes {apart:.1%} longer than GPU {fast} for {point.operation.operator} {point.dtype} {axes}",
            f"GPUs that differ by at most {APART:.0%} and by what the timings of one do",
            "Look at nvidia-smi: clocks, power limits, who else uses them. CUDA_VISIBLE_DEVICES leaves a GPU out.",
        )
