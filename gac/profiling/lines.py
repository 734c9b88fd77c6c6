"""The lines of a profile file.

The file is JSON Lines: the header first; then, as they are measured, the kernels, a row for every point, and a short
line for every later pass over a row, for every time a sentinel was timed, for a row at which the GPU failed later, for
others who used the GPU when the file was resumed, and for other GPUs that measured then.
"""

from typing import Annotated

from msgspec import Meta, Struct

from gac.profiling.records import LARGEST, Cache, Count, Header

Whole = Annotated[int, Meta(ge=0, le=LARGEST)]
Text = Annotated[str, Meta(max_length=2**16)]
Nanoseconds = Annotated[float, Meta(ge=1e-3, le=1e15)]
"""From a picosecond to some days."""


class Line(Struct, frozen=True, gc=False, tag_field="record", forbid_unknown_fields=True, omit_defaults=True):
    """A line of the file; ``record`` says which."""


class HeaderLine(Line, frozen=True, tag="header"):
    header: Header


class KernelLine(Line, frozen=True, tag="kernel"):
    """A kernel; rows refer to kernels by their order in the file."""

    name: Text
    block: tuple[Whole, Whole, Whole]
    shared_bytes: Whole


class RowLine(Line, frozen=True, tag="row"):
    """The first pass over a point. A launch is a kernel's place in the file and its grid along x, y and z."""

    operator: Text
    shape: Annotated[dict[str, Count], Meta(max_length=16)]  # each axis makes every row of the file wider
    dtype: Text  # of numbers, or of a scheme, which need not be known here
    cache: Cache
    median_ns: Nanoseconds | None
    iqr_ns: Annotated[float, Meta(ge=0, le=1e15)] | None
    samples: Whole
    sm_clock_mhz: Count | None
    converged: bool
    launches: tuple[tuple[Whole, Count, Count, Count], ...]
    error: Text | None = None


class AgainLine(Line, frozen=True, tag="again"):
    """A later pass over the row of this number, counted from 0."""

    row: Whole
    median_ns: Nanoseconds


class SentinelLine(AgainLine, frozen=True, tag="sentinel"):
    """The row of this number timed once more, beside the passes: it shows whether the machine drifts."""


class LostLine(Line, frozen=True, tag="lost"):
    """The GPU failed when it timed the row of this number once more: from then on the row has no number."""

    row: Whole
    error: Text


class SharedLine(Line, frozen=True, tag="shared"):
    """Who else used the GPU when the file was resumed."""

    shared_with: Text


class HostLine(Line, frozen=True, tag="host"):
    """What the header says from here on of other GPUs of the host."""

    link: Text | None
    others: tuple[Text, ...]
