"""A profile file while it is being written: one writer, whole lines, resumable."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from gac.errors import ProfileError
from gac.forms import Operation
from gac.profiling.records import AgainLine, Header, HeaderLine, KernelLine, Line, Measurement, RowLine, parse

_SYNC_SECONDS = 1.0


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
        self._places: dict[tuple[Operation, str], int] = {}
        self._names: dict[str, int] = {}
        self._synced = time.monotonic()

    def __enter__(self) -> "Journal":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
        except OSError as failure:
            raise ProfileError(
                f"profile {self.path} cannot be written: {failure.strerror}", "a writable path", "Choose another path."
            ) from failure
        try:
            self._lock()
            self._resume()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def find(self, operation: Operation, dtype: str) -> Measurement | None:
        """The measurement of this shape, if the file holds it."""
        place = self._places.get((operation, dtype))
        return None if place is None else self.rows[place]

    def add(self, row: Measurement) -> None:
        """Append a first measurement, after the names of kernels that the file does not hold yet."""
        for name in row.kernels:
            if name not in self._names:
                self._names[name] = len(self._names)
                self._write(KernelLine("kernel", name))
        fields = {name: value for name, value in vars(row).items() if name not in {"kernels", "passes"}}
        self._write(RowLine("row", **fields, kernels=tuple(self._names[name] for name in row.kernels)))
        self._keep(row if row.median_ns is None else row.with_passes((row.median_ns,)))

    def add_again(self, row: Measurement) -> None:
        """Append another pass over a shape that the file holds."""
        place = self._places[row.operation, row.dtype]
        assert row.median_ns is not None
        self._write(AgainLine("again", place, row.median_ns))
        self.rows[place] = self.rows[place].with_passes((*self.rows[place].passes, row.median_ns))

    def _keep(self, row: Measurement) -> None:
        if row.cache == "cold":
            self._places[row.operation, row.dtype] = len(self.rows)
        self.rows.append(row)

    def _write(self, line: Line) -> None:
        fields = {name: value for name, value in asdict(line).items() if (name, value) != ("error", None)}
        self._file.write(json.dumps(fields, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

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
            found, rows, names = parse(content[:whole], self.path)
            self._check(found)
            self._names = {name: index for index, name in enumerate(names)}
            for row in rows:
                self._keep(row)
        self._file.truncate(whole)
        if not whole:
            self._write(HeaderLine("header", self._header))

    def _check(self, found: Header) -> None:
        different = found.differences(self._header)
        if different:
            was, now = vars(found), vars(self._header)
            raise ProfileError(
                f"profile {self.path} has "
                + ", ".join(f"{name} {was[name]!r} where this machine has {now[name]!r}" for name in different),
                "a file begun on this machine with this software",
                "Write to another file.",
            )
