import json
from pathlib import Path

import pytest

from gac.profiling.table import Header


@pytest.fixture
def header() -> Header:
    return Header(
        schema_version=2,
        gpu="NVIDIA Test GPU",
        device="0123456789abcdef",
        compute_capability="9.0",
        sm_count=132,
        l2_bytes=50_000_000,
        memory_bytes=80_000_000_000,
        shared_memory_bytes=232_448,
        sm_clock_max_mhz=1980,
        memory_clock_mhz=2619,
        power_limit_w=700.0,
        driver="580.1",
        cuda="13.0",
        cublas="13.1.0",
        cudnn="91200",
        torch="2.11.0",
        gac_version="0.1.0",
        dtype_policy="default",
        timing="by hand",
        date="2026-01-01",
        shared_with="",
    )


class ProfileFile:
    """Writes a profile line by line, as plain dicts, so that a test can spoil one."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.lines = [{"record": "header", "header": vars(header)}]

    def row(self, operator: str, shape: dict[str, int], ns: float | None, **changed) -> "ProfileFile":
        row = {"record": "row", "operator": operator, "shape": shape, "dtype": "bf16", "cache": "cold"}
        row |= {"median_ns": ns, "iqr_ns": None if ns is None else 0.001 * ns, "samples": 10}
        self.lines.append(row | {"sm_clock_mhz": 1980, "converged": True, "launches": []} | changed)
        return self

    def ranks(self, latency: dict[int, float], m: int = 1024) -> "ProfileFile":
        for rank, ns in latency.items():
            self.row("low_rank", {"m": m, "k": 4096, "r": rank, "n": 4096}, ns)
        return self

    def kernel(self, name: str, threads: int, shared_bytes: int) -> "ProfileFile":
        return self.line(record="kernel", name=name, block=[threads, 1, 1], shared_bytes=shared_bytes)

    def line(self, **fields) -> "ProfileFile":
        self.lines.append(fields)
        return self

    def write(self, tail: str = "") -> Path:
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.lines) + tail)
        return self.path


@pytest.fixture
def profile_file(tmp_path: Path, header: Header) -> ProfileFile:
    return ProfileFile(tmp_path / "test.jsonl", header)
