from pathlib import Path

import datasets
import pytest


@pytest.fixture(autouse=True)
def _own_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests do not write to the cache of the user.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
