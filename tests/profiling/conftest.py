import json
from pathlib import Path

import msgspec
import pytest

from gac.profiling.records import Header
from tests.headers import make_header


@pytest.fixture
def header() -> Header:
    return make_header()


class ProfileFile:
    """Writes a profile line by line, as plain dicts, so that a test can spoil one."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.lines = [{"record": "header", "header": msgspec.structs.asdict(header)}]

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
