"""The published tables, read strictly: every file has exactly its record's columns, every figure is a figure.

``published/README.md`` says what each is and whose.
"""

import csv
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import TypeVar

from gac.errors import ProfileError

Record = TypeVar("Record")


@dataclass(frozen=True)
class SdpaLatency:
    """``latency_ms`` of SDPA at B=4 S=2048 H=32; None where the backend refused the head_dim."""

    head_dim: int
    backend: str
    latency_ms: float | None
    study: str


@dataclass(frozen=True)
class GemmFigure:
    """A latency at a K, or the throughput of a class of K, which may be a range such as ``61-71``."""

    m: int
    n: int
    k: str
    latency_ms: float | None
    tflops: str
    study: str


@dataclass(frozen=True)
class GemmSweep:
    """What an effect along an axis costs, in per cent of latency."""

    axis: str
    fixed: str
    effect: str
    cost_percent: int


@dataclass(frozen=True)
class HypothesisFigure:
    """What one case of a hypothesis reached; ``wasted_percent`` of sectors fetched, throughput may be a range."""

    hypothesis: str
    case: str
    head_dim: int | None
    gb_s: float | None
    wasted_percent: float | None
    tflops: str


@dataclass(frozen=True)
class KernelTier:
    """Which kernels serve an alignment, and with which Tensor Core instruction."""

    tier: str
    condition: str
    kernel_family: str
    mma: str


@dataclass(frozen=True)
class Template:
    """A FlashAttention-2 template: which head dims it serves, its tile, and a latency that may be a range."""

    low_exclusive: int
    high_inclusive: int
    template: str
    block_rows: int
    block_cols: int
    latency_ms: str


@dataclass(frozen=True)
class Repair:
    """SDPA latency at a head_dim, and zero-padded to a multiple of 8 and of 16."""

    head_dim: int
    original_ms: float
    pad_to_8_ms: float
    pad_to_16_ms: float


@dataclass(frozen=True)
class Constraint:
    """A constraint behind the cliffs and what breaking it costs, in words."""

    level: str
    mechanism: str
    constraint: str
    cost_when_broken: str


@dataclass(frozen=True)
class PaluQuantity:
    """A number, a list of numbers with spaces between, or a note."""

    quantity: str
    value: str


@dataclass(frozen=True)
class HeadDimThroughput:
    """Training throughput at a head_dim."""

    head_dim: int
    tflops: float


@dataclass(frozen=True)
class Int4Regime:
    """The fused INT4 kernel at a batch, against two-op and against the FP16 GEMM."""

    projection: str
    n: int
    k: int
    batch: int
    two_op_us: float
    fused_us: float
    speedup_vs_two_op: float
    speedup_vs_fp16_gemm: float
    fused_gb_s: float


def sdpa(study: str) -> tuple[SdpaLatency, ...]:
    """Latencies of one experiment: S1, S2 or C21."""
    return tuple(row for row in _read("a100_sdpa.csv", SdpaLatency) if row.study == study)


def gemm(study: str) -> tuple[GemmFigure, ...]:
    """Figures of one experiment: G3 (latencies) or C23 (throughput by class)."""
    return tuple(row for row in _read("a100_gemm.csv", GemmFigure) if row.study == study)


def gemm_sweep(axis: str) -> GemmSweep:
    """What was found along ``k``, ``m``, ``gemv k`` or ``gemv n``."""
    found: GemmSweep = next(row for row in _read("a100_gemm_sweeps.csv", GemmSweep) if row.axis == axis)
    return found


def hypothesis(name: str) -> tuple[HypothesisFigure, ...]:
    """Figures of H2, H3 or H4."""
    return tuple(row for row in _read("a100_hypotheses.csv", HypothesisFigure) if row.hypothesis == name)


def kernel_tiers() -> tuple[KernelTier, ...]:
    """The three tiers of cuBLAS, most aligned first."""
    return _read("a100_kernel_tiers.csv", KernelTier)


def templates() -> tuple[Template, ...]:
    """The FlashAttention-2 templates, smallest first."""
    return _read("a100_fa2_templates.csv", Template)


def repairs() -> tuple[Repair, ...]:
    """Zero-padding of the head_dim."""
    return _read("a100_repair.csv", Repair)


def constraint(mechanism: str) -> Constraint:
    """The constraint of this mechanism."""
    found: Constraint = next(row for row in _read("constraints.csv", Constraint) if row.mechanism == mechanism)
    return found


def palu_dims() -> tuple[int, ...]:
    """The distinct dims that PaLU's score gives heads before it rounds them, rising."""
    found = next(row.value for row in _read("palu_dims.csv", PaluQuantity) if row.quantity == "unique_dims")
    return tuple(map(int, found.split()))


@dataclass(frozen=True)
class PaluCounts:
    """Key-value heads that were scored, and how many of them got a multiple of 8."""

    heads: int
    aligned: int


def palu_counts() -> PaluCounts:
    """How many heads PaLU's score was taken of, and how many of their dims are aligned."""
    found = {row.quantity: row.value for row in _read("palu_dims.csv", PaluQuantity)}
    return PaluCounts(int(found["kv_heads"]), int(found["aligned_to_8"]))


def head_dims() -> tuple[HeadDimThroughput, ...]:
    """Megatron at head_dim 128 and 132."""
    return _read("megatron_head_dim.csv", HeadDimThroughput)


def int4_regimes() -> tuple[Int4Regime, ...]:
    """The fused INT4 kernel at batch 1 to 32."""
    return _read("int4_gemv_regimes.csv", Int4Regime)


@cache
def _read(name: str, kind: type[Record]) -> tuple[Record, ...]:
    text = (files("gac.lab.studies") / "published" / name).read_text(encoding="utf-8")
    return parse(text, name, kind)


def parse(text: str, name: str, kind: type[Record]) -> tuple[Record, ...]:
    """The lines of a table as records.

    Raises:
        ProfileError: a column is missing, unknown or out of order, or a cell is not of its column's type.
    """
    lines = list(csv.reader(text.splitlines()))
    columns = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    if not lines or lines[0] != list(columns):
        raise _malformed(f"{name}:1: {','.join(lines[0]) if lines else 'nothing'}", f"the columns {','.join(columns)}")
    records = []
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(columns):
            raise _malformed(f"{name}:{number}: {len(line)} cells", f"{len(columns)}")
        cells = zip(line, columns.items(), strict=True)
        records.append(kind(*(_cell(text, type_, f"{name}:{number}: {column}") for text, (column, type_) in cells)))
    return tuple(records)


def _cell(text: str, kind: object, where: str) -> str | int | float | None:
    if kind is str:
        return text
    if text == "" and kind in (int | None, float | None):
        return None
    try:
        return int(text) if kind in (int, int | None) else float(text)
    except ValueError as failure:
        raise _malformed(f"{where}: {text!r}", "a number") from failure


def _malformed(given: str, expected: str) -> ProfileError:
    return ProfileError(f"published table {given}", expected, "Install gac again: the file comes with it.")
