"""Figures that others measured, read from ``published.json``, which names the content and the source of each table."""

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


def rows(table: str, **values: str) -> tuple[Any, ...]:
    """The rows of a table that have these values, with its columns as attributes."""
    row = namedtuple("row", TABLES[table]["columns"])  # type: ignore[misc]
    every = (row(*cells) for cells in TABLES[table]["rows"])
    return tuple(row for row in every if all(getattr(row, column) == value for column, value in values.items()))


def palu(quantity: str) -> list[int]:
    """Numbers of ``unique_dims``, ``kv_heads`` or ``aligned_to_8``: of the dims that PaLU's score gives heads."""
    numbers: list[int] = rows("palu_dims", quantity=quantity)[0].values
    return numbers


def sdpa_ms(study: str) -> dict[int, float | None]:
    return {row.head_dim: row.latency_ms for row in rows("a100_sdpa", study=study)}


def gemm_ms() -> dict[int, float]:
    """Latency by K of the GEMM 4096 x 4096 x K (experiment G3)."""
    return {int(row.k): row.latency_ms for row in rows("a100_gemm", study="G3")}
