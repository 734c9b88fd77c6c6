from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import LlamaForCausalLM


@pytest.fixture(autouse=True)
def _own_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read for tasks is not kept among the user's data sets."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def directory(tiny_model: LlamaForCausalLM, tiny_tokenizer: Any, tmp_path: Path) -> Path:
    """The tiny model's directory, with its tokenizer."""
    tiny_model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"
