from pathlib import Path

import pytest
from commands import ranks, write_profile


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A low-rank sweep along r, on a GPU like an H100."""
    return write_profile(tmp_path / "recorded.jsonl", ranks(), lambda point: point.operation.axes["r"])
