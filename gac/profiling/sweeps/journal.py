"""A profile file while it is being written: one writer, complete lines, resumable."""

import json
import os
import time
from pathlib import Path
from types import TracebackType

import msgspec

from gac.core.errors import GacError, ProfileError
from gac.core.io import destination, sync_directory
from gac.profiling import records
from gac.profiling.reading import parse
from gac.profiling.records import Header, Launch, Measurement, Point

_SYNC_SECONDS = 1.0
_INCIDENTAL = frozenset({"date", "gac_version", "shared_with", "others"})
_MISSING_IN_OLD_FILES = frozenset({"triton", "link"})
_OPTIONAL = frozenset({"link"})  # only looked up where collectives are measured


class Journal:
    """Appends measurements to a profile, line by line; use as a context manager.

    An existing file is read back (``rows`` holds its measurements), and a last line that a kill cut short is cut off.
    ProfileError where it is malformed, of another machine or other software, written by another process, or not
    writable.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.rows: list[Measurement] = []
        self._header = header
        self._row_of: dict[Point, int] = {}
        self._kernels: dict[records.KernelLine, int] = {}
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
            problem = f"profile {self.path} cannot be written: {failure.strerror}"
            raise ProfileError(problem, "a writable path", "Choose another path.") from failure
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as failure:
            if not isinstance(error, GacError):  # which already says what failed
                raise self._full(failure.strerror) from failure
        finally:
            self._file.close()

    def find(self, point: Point) -> Measurement | None:
        """Return the measurement of this point; safe while another thread adds a row."""
        row = self._row_of.get(point)
        return None if row is None else self.rows[row]

    def add(self, row: Measurement) -> None:
        launches = tuple((self._kernel(launch), *launch.grid) for launch in row.launches)
        fields = {name: getattr(row, name) for name in records.RowLine.__struct_fields__}
        self._write(records.RowLine(**fields | {"launches": launches}))
        self.rows.append(row if row.median_ns is None else row.with_passes((row.median_ns,)))
        self._row_of[row.point] = len(self.rows) - 1

    def add_again(self, point: Point, median_ns: float) -> None:
        number = self._row_of[point]
        self._write(records.AgainLine(number, median_ns))
        self.rows[number] = self.rows[number].with_passes((*self.rows[number].passes, median_ns))

    def add_sentinel(self, point: Point, median_ns: float) -> None:
        self._write(records.SentinelLine(self._row_of[point], median_ns))

    def add_failure(self, row: Measurement) -> None:
        number = self._row_of.get(row.point)
        if number is None:
            self.add(row)
        elif self.rows[number].error is None:
            assert row.error is not None
            self._write(records.LostLine(number, row.error))
            self.rows[number] = row

    def _kernel(self, launch: Launch) -> int:
        line = records.KernelLine(launch.name, launch.block, launch.shared_bytes)
        if line not in self._kernels:
            self._kernels[line] = len(self._kernels)
            self._write(line)
        return self._kernels[line]

    def _write(self, line: records.Line) -> None:
        data = json.dumps(msgspec.to_builtins(line), separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            complete = self._file.write(data) == len(data)
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()
        except OSError as failure:
            raise self._full(failure.strerror) from failure
        if not complete:
            raise self._full("no room")

    def _full(self, reason: str | None) -> ProfileError:
        return ProfileError(
            f"profile {self.path} cannot be written to the end: {reason or 'input/output error'}",
            "room for a line of some hundred bytes",
            "Make room and run the same command again: every complete line counts.",
        )

    def _lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as failure:
            problem, remedy = f"profile {self.path} is being written by another process", "Wait for it to finish"
            raise ProfileError(problem, "one gac profile a file", f"{remedy}, or write to another file.") from failure

    def _resume(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        length = content.rfind(b"\n") + 1
        if not length:
            self._file.truncate(0)
            self._write(records.HeaderLine(self._header))
            os.fsync(self._file.fileno())
            sync_directory(self.path.parent)
            return
        contents = parse(content, self.path)
        check_same_machine(self.path, contents.header, self._header)
        self._kernels = {kernel: index for index, kernel in enumerate(contents.measurements.kernels)}
        self.rows += contents.measurements
        self._row_of = {row.point: number for number, row in enumerate(self.rows)}
        self._file.truncate(length)
        here, recorded = self._header, contents.header
        if here.shared_with not in ("", recorded.shared_with):
            self._write(records.SharedLine(here.shared_with))
        link, others = here.link or recorded.link, tuple(sorted({*recorded.others, *here.others}))
        if (link, others) != (recorded.link, recorded.others):
            self._write(records.HostLine(link, others))


def check_same_machine(path: Path, recorded: Header, here: Header) -> None:
    different = []
    for name in Header.__struct_fields__:
        old, new = getattr(recorded, name), getattr(here, name)
        missing = (old is None and name in _MISSING_IN_OLD_FILES) or (new is None and name in _OPTIONAL)
        if old != new and name not in _INCIDENTAL and not missing:
            different.append(f"{name} {old!r} where this machine has {new!r}")
    if different:
        problem = f"profile {path} has {', '.join(different)}"
        raise ProfileError(problem, "a file begun on this machine with this software", "Write to another file.")
