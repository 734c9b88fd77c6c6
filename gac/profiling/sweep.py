"""Which shapes to measure, and the sweep that measures them: shuffled, resumable, watched for drift."""

import difflib
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from gac.errors import ModelError, ProfileError
from gac.forms import FORMS, Form, Operation, Weight
from gac.models.families import family_of
from gac.models.shapes import SHAPES
from gac.profiling.journal import Journal
from gac.profiling.table import Header, Measurement, Profile
from gac.sites import Site

ROWS = (1, 1024, 4096)
DTYPE_NAMES = ("bf16", "fp16")

PASSES = 2

_BATCH = 256


# --- which shapes ---------------------------------------------------------------------------------------------------


def dims_of(largest: int) -> tuple[int, ...]:
    """The dims to measure along an axis that goes up to ``largest``, sorted.

    - every multiple of 8 where there are at most 512 of them; otherwise every multiple of 8 up to 1088 and within
      64 of a quarter, a half and three quarters, every multiple of 64, and one dim of each class 8, 16 and 32 in
      every 128, so that interpolation inside a class finds neighbours;
    - 1, 2 and 4 off some multiples of 64, each at most 1.2 times the one before (or 64 after it);
    - one unbroken stretch of integers around the largest power of two up to 1024.
    """
    dims = set(range(8, largest + 1, 8) if largest <= 4096 else _coarse(largest))
    for anchor in _anchors(largest):
        dims.update(anchor + offset for offset in (-4, -2, -1, 1, 2, 4))
    centre = 2 ** min(largest.bit_length() - 1, 10)
    half = 16 if centre >= 512 else 8
    dims.update(range(centre - half, centre + half + 1))
    return tuple(sorted(dim for dim in dims if 8 <= dim <= largest))


def _coarse(largest: int) -> Iterator[int]:
    yield from range(8, 1089, 8)
    yield from range(64, largest + 1, 64)
    for block in range(0, largest + 1, 128):
        odd = 2 * (block // 128 % 4) + 1
        yield from (block + 8 * odd, block + 16 * (odd % 4), block + 32 * (odd % 4 % 2 * 2 + 1))
    for quarter in (1, 2, 3):
        middle = largest * quarter // 4 // 64 * 64
        yield from range(middle - 64, middle + 65, 8)


def _anchors(largest: int) -> Iterator[int]:
    anchor = 64
    while anchor <= largest:
        yield anchor
        anchor = max(anchor + 64, int(anchor * 1.2) // 64 * 64)


def operations_for(sites: Iterable[Site], rows: Sequence[int] = ROWS) -> list[Operation]:
    """Every distinct shape that is worth measuring for these sites, at each number of rows.

    For each weight: dense, low-rank pairs up to the largest rank that saves parameters, and, where the weight
    has neurons, fewer of them.
    """
    shapes = {replace(weight, name="") for site in sites for weight in site.weights}
    found: dict[Operation, None] = {}
    for weight in sorted(shapes, key=lambda one: (one.out_features, one.in_features)):
        for form in FORMS.values():
            for dim in _dims(form, weight):
                found.update((form.operation(weight, dim, count), None) for count in rows)
    return list(found)


def _dims(form: Form, weight: Weight) -> tuple[int, ...]:
    if form.axis(weight) is None:
        return (form.full(weight),)
    if form.name == "narrow" and weight.neurons is None:
        return ()
    return dims_of(form.largest_useful(weight))


def operations_of_models(models: Sequence[Any], rows: Sequence[int] = ROWS) -> list[Operation]:
    """The distinct shapes of several models: names in ``gac.models.shapes.SHAPES``, or transformers configs.

    Raises:
        ModelError: a name is unknown, or a config's architecture is not supported.
    """
    sites = [site for model in models for site in family_of(_config(model)).sites(_config(model))]
    return operations_for(sites, rows)


def _config(model: Any) -> Any:
    if not isinstance(model, str):
        return model
    if model in SHAPES:
        return SHAPES[model]
    near = difflib.get_close_matches(model, SHAPES, n=1)
    raise ModelError(
        f"no shapes are known for model {model!r}",
        f"one of {', '.join(SHAPES)}, or a transformers config",
        f"Did you mean {near[0]!r}?" if near else "Pass the model's config.",
    )


# --- measuring them -------------------------------------------------------------------------------------------------


class Measurer(Protocol):
    """What a sweep measures with; ``gac.profiling.measure.GpuMeasurer`` is the real one."""

    dtype: str

    def measure(self, operation: Operation) -> Measurement:
        """Time one shape; a failing shape is a row with an error."""

    def kernels(self, operations: Sequence[Operation]) -> Sequence[tuple[str, ...]]:
        """Names of the kernels that each operation launches."""


Find = Callable[[Operation, str], Measurement | None]


@dataclass(frozen=True)
class SweepReport:
    """What one run of a sweep did: timings taken, timings left by the time limit, and new shapes that failed."""

    path: Path
    timed: int
    remaining: int
    failed: int
    seconds: float


def run_sweep(
    operations: Sequence[Operation],
    path: Path,
    measurer: Measurer,
    header: Header,
    *,
    passes: int = PASSES,
    seconds: float | None = None,
    progress: bool = True,
) -> SweepReport:
    """Time every operation as often as the file does not hold it yet, and append each timing at once.

    Each pass goes through all shapes in an order of its own, shuffled with a fixed seed: drift does not look like a
    cliff, and a burst of noise hits different neighbours each time. An interrupt leaves a file that the next run
    resumes.

    Args:
        seconds: stop after about this long; the next run goes on.

    Raises:
        ProfileError: the file is malformed, locked, not writable, or of another machine or other software.
    """
    begun = time.monotonic()
    timed, failed = 0, 0
    with Journal(path, header) as journal:
        todo = [_missing(operations, journal.find, measurer.dtype, number) for number in range(passes)]
        total = sum(map(len, todo))
        with _bar(total, progress) as advance:
            for operation, kernels in _in_order(todo, measurer):
                if seconds is not None and time.monotonic() - begun >= seconds:
                    break
                failed += _time_once(journal, measurer, operation, kernels)
                timed += 1
                advance()
    return SweepReport(path, timed, total - timed, failed, time.monotonic() - begun)


def _missing(operations: Sequence[Operation], find: Find, dtype: str, number: int) -> list[Operation]:
    """The operations that lack the pass of this number (from 0), in the pass's order; a failed shape lacks none."""
    order = list(operations)
    random.Random(number).shuffle(order)
    return [one for one in order if (row := find(one, dtype)) is None or (not row.error and len(row.passes) <= number)]


def _in_order(todo: Sequence[list[Operation]], measurer: Measurer) -> Iterator[tuple[Operation, tuple[str, ...]]]:
    """Every operation of every pass; in the first one with its kernels, which are looked up some hundreds at a time."""
    for start in range(0, len(todo[0]), _BATCH):
        batch = todo[0][start : start + _BATCH]
        yield from zip(batch, measurer.kernels(batch), strict=True)
    for later in todo[1:]:
        yield from ((operation, ()) for operation in later)


def _time_once(journal: Journal, measurer: Measurer, operation: Operation, kernels: tuple[str, ...]) -> bool:
    """Append one timing; True if the shape is new and failed."""
    known = journal.find(operation, measurer.dtype)
    if known is not None and known.error:
        return False  # it failed in this run's first pass
    row = measurer.measure(operation)
    if known is None:
        journal.add(replace(row, kernels=kernels))
        return row.error is not None
    if row.error is None:
        journal.add_again(row)
    return False


@contextmanager
def _bar(total: int, progress: bool) -> Iterator[Any]:
    from tqdm import tqdm

    with tqdm(total=total, unit="timing", desc="profile", disable=not progress) as bar:
        yield bar.update


# --- the whole job --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """How much a sweep has to do: shapes, timings that the file lacks (several a shape), and about how many seconds."""

    path: Path
    shapes: int
    remaining: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.shapes:,} shapes, {self.remaining:,} timings to take into {self.path}: "
            f"about {max(self.seconds / 60, 0.1):.1f} minutes"
        )


def estimate(
    models: Sequence[Any],
    rows: Sequence[int] = ROWS,
    dtype: str = "bf16",
    path: str | Path | None = None,
    passes: int = PASSES,
) -> Estimate:
    """What ``profile_gpu`` with the same arguments would have to do on this GPU.

    Raises:
        ProfileError: there is no GPU, an argument is out of range, or the file is malformed.
        ModelError: a model is unknown or not supported.
    """
    _check_arguments(rows, dtype, passes)
    header, target = _here(path)
    return _estimate(operations_of_models(models, rows), target, dtype, passes, header)


def profile_gpu(
    models: Sequence[Any],
    rows: Sequence[int] = ROWS,
    dtype: str = "bf16",
    path: str | Path | None = None,
    passes: int = PASSES,
    seconds: float | None = None,
    progress: bool = True,
) -> Path:
    """Measure the local GPU at the shapes of these models, or go on where an earlier run stopped.

    Args:
        models: names in ``gac.models.shapes.SHAPES``, or transformers configs.
        rows: numbers of rows (tokens that run at once).
        dtype: ``bf16`` or ``fp16``.
        path: the file; by default the place where this GPU's profile is looked for.
        passes: how often to time every shape.
        seconds: stop after about this long; the next call goes on.
        progress: say on standard error how much there is to do, how it goes, and how it went.

    Returns:
        the file's path.

    Raises:
        ProfileError: there is no GPU, an argument is out of range, or the file cannot be resumed here.
        ModelError: a model is unknown or not supported.
    """
    _check_arguments(rows, dtype, passes)
    operations = operations_of_models(models, rows)
    header, target = _here(path)
    ahead = _estimate(operations, target, dtype, passes, header)
    _say(str(ahead), progress)
    if ahead.remaining:
        from gac.profiling.measure import GpuMeasurer

        measurer = GpuMeasurer(operations, dtype, header)
        report = run_sweep(operations, target, measurer, header, passes=passes, seconds=seconds, progress=progress)
        _say(f"{report.timed:,} timings in {report.seconds:.0f} s, {report.remaining:,} left", progress)
    _say(summary(Profile.load(target)), progress)
    return target


def summary(profile: Profile) -> str:
    """What a profile holds and how far it can be trusted, in one line."""
    return (
        f"{len(profile.measurements):,} shapes of {profile.header.gpu}, {len(profile.failed)} failed; "
        f"{profile.converged_fraction:.1%} converged, passes within {profile.spread:.1%} for 95 %, "
        f"drift {profile.drift:+.2%}"
    )


def _say(text: str, progress: bool) -> None:
    if progress:
        print(text, file=sys.stderr)


def _check_arguments(rows: Sequence[int], dtype: str, passes: int) -> None:
    if not rows or any(count < 1 for count in rows):
        raise ProfileError(
            f"rows {list(rows)}", "at least one positive number of rows", "Use for example 1, 1024, 4096."
        )
    if dtype not in DTYPE_NAMES:
        raise ProfileError(f"dtype {dtype!r}", f"one of {', '.join(DTYPE_NAMES)}", "Correct the name.")
    if passes < 1:
        raise ProfileError(f"{passes} passes", "at least 1", f"Use {PASSES}, the default.")


def _here(path: str | Path | None) -> tuple[Header, Path]:
    from gac.profiling.device import default_path, fingerprint

    header = fingerprint()
    return header, Path(path) if path is not None else default_path(header.gpu)


def _estimate(operations: Sequence[Operation], target: Path, dtype: str, passes: int, header: Header) -> Estimate:
    """Twelve replays of at least 0.5 ms a timing, at half the tensor cores' rate, and 5 ms for everything else."""
    from gac.profiling.operators import OPERATORS

    known: dict[tuple[Operation, str], Measurement] = {}
    if target.is_file() and target.stat().st_size:
        known = {(row.operation, row.dtype): row for row in Profile.load(target).measurements}

    def find(operation: Operation, kind: str) -> Measurement | None:
        return known.get((operation, kind))

    missing = [one for number in range(passes) for one in _missing(operations, find, dtype, number)]
    rate = header.sm_count * header.sm_clock_max_mhz * 1e6 * 2048
    seconds = sum(0.005 + 12 * max(5e-4, OPERATORS[one.operator].flops(one.axes) / rate) for one in missing)
    return Estimate(target, len(operations), len(missing), seconds)
