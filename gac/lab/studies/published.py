"""The published tables, read strictly: every file has exactly these columns, every figure is a figure.

``published/README.md`` says what each is and whose.
"""

import csv
from collections import namedtuple
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from gac.core.errors import ProfileError

TABLES: Mapping[str, str] = MappingProxyType(
    {
        # SDPA at B=4 S=2048 H=32 by experiment (S1, S2, C21); no latency where the backend refused the head_dim
        "a100_sdpa": "head_dim:int backend:str latency_ms:float? study:str",
        # a latency at a K (G3), or the throughput of a class of K (C23), which may be a range such as 61-71
        "a100_gemm": "m:int n:int k:str latency_ms:float? tflops:str study:str",
        # what an effect along k, m, gemv k or gemv n costs, in per cent of latency
        "a100_gemm_sweeps": "axis:str fixed:str effect:str cost_percent:int",
        # what a case of a hypothesis (H2, H3, H4) reached; the throughput may be a range
        "a100_hypotheses": "hypothesis:str case:str head_dim:int? gb_s:float? wasted_percent:float? tflops:str",
        # which kernels serve an alignment, the most aligned first
        "a100_kernel_tiers": "tier:str condition:str kernel_family:str mma:str",
        # a FlashAttention-2 template: which head dims it serves, its tile, and a latency that may be a range
        "a100_fa2_templates": "low_exclusive:int high_inclusive:int template:str block_rows:int block_cols:int "
        "latency_ms:str",
        # SDPA at a head_dim, and zero-padded to a multiple of 8 and of 16
        "a100_repair": "head_dim:int original_ms:float pad_to_8_ms:float pad_to_16_ms:float",
        # a constraint behind the cliffs and what breaking it costs, in words
        "constraints": "level:str mechanism:str constraint:str cost_when_broken:str",
        # a number, a list of numbers with spaces between, or a note
        "palu_dims": "quantity:str value:str",
        # Megatron's training throughput
        "megatron_head_dim": "head_dim:int tflops:float",
        # the fused INT4 kernel at a batch, against two-op and against the FP16 GEMM
        "int4_gemv_regimes": "projection:str n:int k:int batch:int two_op_us:float fused_us:float "
        "speedup_vs_two_op:float speedup_vs_fp16_gemm:float fused_gb_s:float",
    }
)


def rows(name: str, **wanted: str) -> tuple[Any, ...]:
    """The rows of a table that have these values, with its columns as attributes."""
    return tuple(row for row in _read(name) if all(getattr(row, column) == value for column, value in wanted.items()))


def palu(quantity: str) -> tuple[int, ...]:
    """The numbers of ``unique_dims``, ``kv_heads`` or ``aligned_to_8``: of the dims that PaLU's score gives heads."""
    (row,) = rows("palu_dims", quantity=quantity)
    return tuple(map(int, row.value.split()))


def sdpa_ms(study: str) -> dict[int, float | None]:
    """Latency by head_dim in one experiment."""
    return {row.head_dim: row.latency_ms for row in rows("a100_sdpa", study=study)}


def gemm_ms() -> dict[int, float]:
    """Latency by K of the GEMM 4096 x 4096 x K (experiment G3)."""
    return {int(row.k): row.latency_ms for row in rows("a100_gemm", study="G3")}


@cache
def _read(name: str) -> tuple[Any, ...]:
    text = (files("gac.lab.studies") / "published" / f"{name}.csv").read_text(encoding="utf-8")
    return parse(text, f"{name}.csv", TABLES[name])


def parse(text: str, name: str, columns: str) -> tuple[Any, ...]:
    """The lines of a table as named tuples.

    Args:
        columns: as in ``TABLES``; where the type has a question mark a cell may be empty.

    Raises:
        ProfileError: a column is missing, unknown or out of order, or a cell is not of its column's type.
    """
    types = dict(column.split(":") for column in columns.split())
    row = namedtuple("row", types)  # type: ignore[misc]  # its name is of no use
    lines = list(csv.reader(text.splitlines()))
    if not lines or lines[0] != list(types):
        raise _malformed(f"{name}:1: {','.join(lines[0]) if lines else 'nothing'}", f"the columns {','.join(types)}")
    found = []
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(types):
            raise _malformed(f"{name}:{number}: {len(line)} cells", f"{len(types)}")
        cells = zip(line, types.items(), strict=True)
        found.append(row(*(_cell(cell, kind, f"{name}:{number}: {column}") for cell, (column, kind) in cells)))
    return tuple(found)


def _cell(text: str, kind: str, where: str) -> str | int | float | None:
    if kind == "str":
        return text
    if not text and kind.endswith("?"):
        return None
    try:
        return int(text) if kind.startswith("int") else float(text)
    except ValueError as failure:
        raise _malformed(f"{where}: {text!r}", "a number") from failure


def _malformed(given: str, expected: str) -> ProfileError:
    return ProfileError(f"published table {given}", expected, "Install gac again: the file comes with it.")
