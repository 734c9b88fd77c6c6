"""At which dims an axis is measured, so that every multiple of 8 has a latency."""

from collections.abc import Iterable, Iterator

from gac.profiling.table import COARSEST_CLASS


def every_dim(largest: int) -> tuple[int, ...]:
    """The multiples of 8 along an axis that goes up to ``largest``, and misaligned probes; sorted."""
    return _sorted({*range(8, largest + 1, 8), *_probes(largest)}, largest)


def spaced_dims(largest: int) -> tuple[int, ...]:
    """The dims to measure where not all can be, sorted; between them no multiple of 8 goes without a latency.

    - The multiples of 32, from 1024 on those of 64, from 4096 on those of 128: most of what an allocation chooses was
      measured.
    - Of each alignment class 8, 16 and 32, dims near enough for ``gac.profiling.table.interpolate``.
    - Misaligned probes: 1, 2 and 4 below powers of two, to tell the alignment period.
    """
    ladders = (dim for step in (8, 16, 32) for dim in _ladder(step, largest))
    return _sorted({*_measured(largest), *ladders, *_probes(largest)}, largest)


def _measured(largest: int) -> Iterator[int]:
    yield from range(32, min(largest, 1024) + 1, 32)
    yield from range(1024, min(largest, 4096) + 1, 64)
    yield from range(4096, largest + 1, 128)
    yield largest // 64 * 64


def _ladder(step: int, largest: int) -> Iterator[int]:
    """Odd multiples of a step up to the last one, as far apart as interpolation reaches: 64, or a dim's quarter."""
    last = ((largest // step - 1) | 1) * step
    dim = step
    while dim < last:
        yield dim
        widest = max(COARSEST_CLASS, (dim + 2 * step) // 4)
        dim += widest // (2 * step) * (2 * step)
    yield last


def _probes(largest: int) -> Iterator[int]:
    """Odd dims, odd multiples of 2 and of 4: at least three of each where the axis reaches 128."""
    below = (1, 2, 4) if largest >= 256 else (1, 2, 3, 4, 6, 12)
    anchor = 64
    while anchor <= largest:
        yield from (anchor - offset for offset in below)
        anchor *= 2


def _sorted(dims: Iterable[int], largest: int) -> tuple[int, ...]:
    return tuple(sorted(dim for dim in dims if 8 <= dim <= largest))
