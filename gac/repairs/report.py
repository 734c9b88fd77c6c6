"""The result of a repair: the dims that moved, what that costs, and what it wins, as JSON and as rich tables."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from rich.console import Group
from rich.text import Text

from gac.forms import form_named
from gac.repairs.contract import ShapeContract
from gac.repairs.times import Times
from gac.reporting.formatting import legend, new_table

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Moved:
    """One dim that was padded; ``added_bytes`` is what its tensors grew by."""

    name: str
    dim: int
    becomes: int
    added_bytes: int


@dataclass(frozen=True)
class Carried:
    """One dim that is as it was: of a form that counts heads or blocks, which need no zeros."""

    name: str
    form: str
    dim: int


@dataclass(frozen=True)
class Repaired:
    """A repaired checkpoint.

    Attributes:
        layouts: in which the dims were found.
        dims: how many there are that can be padded.
        moved: those that were padded, in the order of the tensors.
        carried: dims that count heads or blocks, which are written as they were.
        kept: names of those that stayed unaligned because of a limit.
        bytes_before, bytes_after: of all tensors of the checkpoint.
        times: of the GEMMs that the dims are of, for every workload.
        profile: the GPU of the latency table used for predictions and for the strategy ``profile``, and why that one.
        left_out: files that were not copied: pickles and code.
    """

    source: str
    output: str
    layouts: tuple[str, ...]
    contract: ShapeContract
    dims: int
    moved: tuple[Moved, ...]
    carried: tuple[Carried, ...]
    kept: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    times: tuple[Times, ...]
    profile: str
    left_out: tuple[str, ...]

    @property
    def added_bytes(self) -> int:
        return self.bytes_after - self.bytes_before

    @property
    def overhead(self) -> float:
        """The bytes added, as a fraction of the checkpoint's."""
        return self.added_bytes / self.bytes_before


def repair_document(repaired: Repaired) -> dict[str, Any]:
    """What ``--json`` prints."""
    return asdict(repaired) | {"added_bytes": repaired.added_bytes, "overhead": repaired.overhead}


def repair_tables(repaired: Repaired) -> list[Group | Text]:
    """The dims that moved, those of one kind in one row; then memory and time."""
    moved = [_moved_table(repaired)] if repaired.moved else []
    return [*moved, _times_table(repaired), _summary(repaired)]


def _moved_table(repaired: Repaired) -> Group:
    kinds: dict[tuple[str, int, int], list[Moved]] = {}
    for one in repaired.moved:
        kinds.setdefault((_NUMBER.sub("*", one.name), one.dim, one.becomes), []).append(one)
    table = new_table([("weight", "<"), *((name, ">") for name in ("dims", "from", "to", "grown", "added bytes"))])
    for (name, dim, becomes), same in kinds.items():
        added = sum(one.added_bytes for one in same)
        table.add_row(name, str(len(same)), str(dim), str(becomes), f"{becomes / dim - 1:.2%}", f"{added:,}")
    return Group(table, legend("*: layers or groups; dims: how many of them had this dim"))


def _times_table(repaired: Repaired) -> Group:
    columns = ["workload", "", "before", "after", "before / after"]
    table = new_table((column, ">" if at > 1 else "<") for at, column in enumerate(columns))
    for one in repaired.times:
        table.add_row(one.workload, one.how, *_ns(one), _won(one))
    gpus = dict.fromkeys(f"{one.how}: {one.gpu}" for one in repaired.times)
    return Group(table, legend("\n".join(["the GEMMs that these dims are of, summed over the model, bf16", *gpus])))


def _ns(one: Times) -> Iterator[str]:
    for ns, unknown in ((one.before_ns, one.before_unknown), (one.after_ns, one.after_unknown)):
        yield f"unknown: {unknown} of {one.gemms} GEMMs" if ns is None else f"{ns / 1e6:.3f} ms"


def _won(one: Times) -> str:
    return "" if one.before_ns is None or not one.after_ns else f"{one.before_ns / one.after_ns:.2f}x"


def _summary(repaired: Repaired) -> Text:
    limit = repaired.contract.most_overhead
    unaligned = len(repaired.kept)
    limited = "" if limit is None else f", a dim grows by {limit:.0%} at most"
    lines = [
        f"{repaired.source} -> {repaired.output} ({', '.join(repaired.layouts)})",
        f"strategy  {repaired.contract.strategy}{limited}",
        f"dims      {len(repaired.moved)} of {repaired.dims} moved, {unaligned} kept that are no multiple of 8",
        *_carried(repaired),
        f"memory    {repaired.bytes_before:,} -> {repaired.bytes_after:,} bytes, {repaired.added_bytes:,} added "
        f"({repaired.overhead:.2%})",
        f"profile   {repaired.profile}",
    ]
    if repaired.left_out:
        lines.append(f"left out  {', '.join(repaired.left_out)} (pickles and code)")
    return Text("\n".join(lines))


def _carried(repaired: Repaired) -> Iterator[str]:
    """How many sites have a form at each of its dims."""
    for form, same in groupby(sorted(repaired.carried, key=lambda one: (one.form, one.dim)), lambda one: one.form):
        counts = Counter(form_named(form).label(one.dim) for one in same)
        told = ", ".join(f"{count} x {dim}" for dim, count in counts.items())
        yield f"carried   {form} as they were: {told}; there is nothing to pad"
