"""A profile file while it is being written: one writer, whole lines, resumable."""

import json
import os
import time
from pathlib import Path
from types import TracebackType

import msgspec

from gac.core.errors import GacError, ProfileError
from gac.core.io import destination, sync_directory
from gac.profiling.lines import (
    AgainLine,
    HeaderLine,
    HostLine,
    KernelLine,
    Line,
    LostLine,
    RowLine,
    SentinelLine,
    SharedLine,
)
from gac.profiling.reading import parse
from gac.profiling.records import Header, Launch, Measurement, Point

_SYNC_SECONDS = 1.0
_INCIDENTAL = frozenset({"date", "gac_version", "shared_with", "others"})
_LATER = frozenset({"triton", "link"})  # files from before do not say it
_NOT_ALWAYS = frozenset({"link"})  # who measures no collectives does not ask


class Journal:
    """Appends measurements to a profile, line by line; use as a context manager.

    A new file gets ``header`` as its first line. An existing one is read back (``rows`` holds its measurements),
    and a last line that a kill cut short is cut off.

    Raises:
        ProfileError: the file is malformed, belongs to another machine or other software, is being written by
            another process, or cannot be written.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.rows: list[Measurement] = []
        self._header = header
        self._places: dict[Point, int] = {}
        self._kernels: dict[KernelLine, int] = {}
        self._synced = time.monotonic()

    def __enter__(self) -> "Journal":
        try:
            destination(self.path)  # refuses a device or a FIFO
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
            try:
                self._lock()
                self._resume()
            except BaseException:
                self._file.close()
                raise
        except OSError as failure:
            raise ProfileError(
                f"profile {self.path} cannot be written: {failure.strerror}", "a writable path", "Choose another path."
            ) from failure
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as failure:
            if not isinstance(error, GacError):  # which already says what failed
                raise self._full(failure.strerror) from failure
        finally:
            self._file.close()

    def find(self, point: Point) -> Measurement | None:
        """The measurement of this point, if the file holds it."""
        place = self._places.get(point)
        return None if place is None else self.rows[place]

    def add(self, row: Measurement) -> None:
        """Append a first measurement, after the kernels that the file does not hold yet."""
        launches = tuple((self._kernel(launch), *launch.grid) for launch in row.launches)
        fields = {name: value for name, value in vars(row).items() if name not in {"launches", "passes"}}
        self._write(RowLine(**fields, launches=launches))
        self._places[row.point] = len(self.rows)
        self.rows.append(row if row.median_ns is None else row.with_passes((row.median_ns,)))

    def add_again(self, point: Point, median_ns: float) -> None:
        """Append another pass over a point that the file holds."""
        place = self._places[point]
        self._write(AgainLine(place, median_ns))
        self.rows[place] = self.rows[place].with_passes((*self.rows[place].passes, median_ns))

    def add_sentinel(self, point: Point, median_ns: float) -> None:
        """Append a timing of a point that is a sentinel; it is no pass."""
        self._write(SentinelLine(self._places[point], median_ns))

    def add_failure(self, row: Measurement) -> None:
        """Keep that the GPU failed at a point, whether or not the file holds numbers of it."""
        place = self._places.get(row.point)
        if place is None:
            self.add(row)
        elif self.rows[place].error is None:
            assert row.error is not None
            self._write(LostLine(place, row.error))
            self.rows[place] = row

    def _kernel(self, launch: Launch) -> int:
        line = KernelLine(launch.name, launch.block, launch.shared_bytes)
        if line not in self._kernels:
            self._kernels[line] = len(self._kernels)
            self._write(line)
        return self._kernels[line]

    def _write(self, line: Line) -> None:
        data = json.dumps(msgspec.to_builtins(line), separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            whole = self._file.write(data) == len(data)
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()
        except OSError as failure:
            raise self._full(failure.strerror) from failure
        if not whole:
            raise self._full("no room")

    def _full(self, reason: str | None) -> ProfileError:
        return ProfileError(
            f"profile {self.path} cannot be written to the end: {reason or 'input/output error'}",
            "room for a line of some hundred bytes",
            "Make room and run the same command again: every whole line counts.",
        )

    def _lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as failure:
            raise ProfileError(
                f"profile {self.path} is being written by another process",
                "one gac profile a file",
                "Wait for it to finish, or write to another file.",
            ) from failure

    def _resume(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole:
            found = parse(content, self.path)
            check_same_machine(self.path, found.header, self._header)
            self._kernels = {kernel: index for index, kernel in enumerate(found.measurements.kernels)}
            self.rows += found.measurements
            self._places = {row.point: place for place, row in enumerate(self.rows)}
        self._file.truncate(whole)
        if not whole:
            self._write(HeaderLine(self._header))
            os.fsync(self._file.fileno())
            sync_directory(self.path.parent)
        else:
            self._go_on(found.header)

    def _go_on(self, found: Header) -> None:
        """Say what the header of the file does not: who else uses the GPU now, and which GPUs measure beside it."""
        here = self._header
        if here.shared_with not in ("", found.shared_with):
            self._write(SharedLine(here.shared_with))
        link, others = here.link or found.link, tuple(sorted({*found.others, *here.others}))
        if (link, others) != (found.link, found.others):
            self._write(HostLine(link, others))


def check_same_machine(path: Path, found: Header, here: Header) -> None:
    """Refuse a file that was begun on another machine or with other software.

    Raises:
        ProfileError: naming what differs.
    """
    fields = ((name, getattr(found, name), getattr(here, name)) for name in Header.__struct_fields__)
    different = [
        f"{name} {was!r} where this machine has {now!r}"
        for name, was, now in fields
        if was != now
        and name not in _INCIDENTAL
        and not (was is None and name in _LATER)
        and not (now is None and name in _NOT_ALWAYS)
    ]
    if different:
        raise ProfileError(
            f"profile {path} has {', '.join(different)}",
            "a file begun on this machine with this software",
            "Write to another file.",
        )
