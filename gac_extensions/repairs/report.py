"""The result of a repair: the padded dims, their cost, and the latencies, as JSON and as rich tables."""

import re
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from gac.core.display import Table
from gac.forms import form_named
from gac_extensions.repairs.contract import ShapeContract
from gac_extensions.repairs.times import Times

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class PaddedDim:
    """A padded dim; ``added_bytes`` is the growth of its tensors."""

    name: str
    dim: int
    becomes: int
    added_bytes: int


@dataclass(frozen=True)
class UnpaddedDim:
    """A dim of a form that counts heads or blocks, which need no zeros."""

    name: str
    form: str
    dim: int


@dataclass(frozen=True)
class RepairResult:
    """A repaired checkpoint."""

    source: str
    output: str
    layouts: tuple[str, ...]
    contract: ShapeContract
    dims: int  # number of dims that can be padded
    moved: tuple[PaddedDim, ...]  # those that were padded, in the order of the tensors
    carried: tuple[UnpaddedDim, ...]
    kept: tuple[str, ...]  # names of those that stay unaligned because of a limit
    bytes_before: int  # of all tensors of the checkpoint
    bytes_after: int
    times: tuple[Times, ...]  # of the GEMMs with these dims, for every workload
    profile: str  # the GPU of the latency table, and the reason for this table
    left_out: tuple[str, ...]  # files that were not copied: pickles and code

    @property
    def added_bytes(self) -> int:
        return self.bytes_after - self.bytes_before

    @property
    def overhead(self) -> float:
        return self.added_bytes / self.bytes_before


def repair_document(result: RepairResult) -> dict[str, Any]:
    return asdict(result) | {"added_bytes": result.added_bytes, "overhead": result.overhead}


def repair_tables(result: RepairResult) -> list[Table | Text]:
    padded = [_padded_table(result)] if result.moved else []
    return [*padded, _times_table(result), _summary(result)]


def _padded_table(result: RepairResult) -> Table:
    kinds: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
    for dim in result.moved:
        kinds[_NUMBER.sub("*", dim.name), dim.dim, dim.becomes].append(dim.added_bytes)
    columns = [("weight", "<"), *((name, ">") for name in ("dims", "from", "to", "grown", "added bytes"))]
    rows = [
        (name, str(len(added)), str(before), str(after), f"{after / before - 1:.2%}", f"{sum(added):,}")
        for (name, before, after), added in kinds.items()
    ]
    return Table(columns, rows, notes="*: layers or groups; dims: how many of them had this dim")


def _times_table(result: RepairResult) -> Table:
    columns = [("workload", "<"), ("", "<"), ("before", ">"), ("after", ">"), ("before / after", ">")]
    rows = []
    for row in result.times:
        sides = ((row.before_ns, row.before_unknown), (row.after_ns, row.after_unknown))
        cells = [
            f"unknown: {unknown} of {row.gemms} GEMMs" if ns is None else f"{ns / 1e6:.3f} ms" for ns, unknown in sides
        ]
        ratio = "" if row.before_ns is None or not row.after_ns else f"{row.before_ns / row.after_ns:.2f}x"
        rows.append((row.workload, row.how, *cells, ratio))
    gpus = dict.fromkeys(f"{row.how}: {row.gpu}" for row in result.times)
    notes = "\n".join(["the GEMMs that these dims are of, summed over the model, bf16", *gpus])
    return Table(columns, rows, notes=notes)


def _summary(result: RepairResult) -> Text:
    overhead = result.contract.most_overhead
    limit = "" if overhead is None else f", a dim grows by {overhead:.0%} at most"
    lines = [
        f"{result.source} -> {result.output} ({', '.join(result.layouts)})",
        f"strategy  {result.contract.strategy}{limit}",
        f"dims      {len(result.moved)} of {result.dims} moved, {len(result.kept)} kept that are no multiple of 8",
    ]
    for form in sorted({dim.form for dim in result.carried}):
        counts = sorted(Counter(dim.dim for dim in result.carried if dim.form == form).items())
        labels = ", ".join(f"{count} x {form_named(form).label(dim)}" for dim, count in counts)
        lines.append(f"carried   {form} as they were: {labels}; there is nothing to pad")
    added = f"{result.added_bytes:,} added ({result.overhead:.2%})"
    lines += [
        f"memory    {result.bytes_before:,} -> {result.bytes_after:,} bytes, {added}",
        f"profile   {result.profile}",
    ]
    if result.left_out:
        lines.append(f"left out  {', '.join(result.left_out)} (pickles and code)")
    return Text("\n".join(lines))
