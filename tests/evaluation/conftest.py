from pathlib import Path

import datasets
import pytest


@pytest.fixture(autouse=True)
def _own_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read for tasks is not kept among the user's data sets."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
