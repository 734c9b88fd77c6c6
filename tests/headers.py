"""The fingerprint of a machine that does not exist, and profiles of it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from gac.profiling.reading import parse
from gac.profiling.records import SCHEMA, Header, HeaderLine, Measurement, RowLine
from gac.profiling.table import Profile

MACHINE: dict[str, Any] = {
    "schema_version": SCHEMA,
    "gpu": "NVIDIA Test GPU",
    "device": "0123456789abcdef",
    "compute_capability": "9.0",
    "sm_count": 132,
    "l2_bytes": 50_000_000,
    "memory_bytes": 80_000_000_000,
    "shared_memory_bytes": 232_448,
    "sm_clock_max_mhz": 1980,
    "memory_clock_mhz": 2619,
    "power_limit_w": 700.0,
    "driver": "580.1",
    "cuda": "13.0",
    "cublas": "13.1.0",
    "cudnn": "91200",
    "torch": "2.11.0",
    "gac_version": "0.1.0",
    "dtype_policy": "default",
    "timing": "by hand",
    "date": "2026-01-01",
    "shared_with": "",
}


def make_header() -> Header:
    return Header(**MACHINE)


def make_profile(rows: Iterable[Measurement], digest: str = "2" * 64) -> Profile:
    """A profile of these measurements, whose kernels are not known."""
    lines = [HeaderLine(make_header())]
    lines += [RowLine(**{name: getattr(row, name) for name in RowLine.__struct_fields__}) for row in rows]
    found = parse(b"\n".join(map(msgspec.json.encode, lines)) + b"\n", "test.jsonl")
    return Profile(Path("test.jsonl"), found.header, found.measurements, digest, {})
