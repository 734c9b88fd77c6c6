"""``gac export``: its words, its JSON, its refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from gac.plan import Plan
from tests.cli.commands import refused, run
from tests.compression.compressed import small_compressed


@pytest.fixture
def saved(make_plan: Callable[..., Plan], tmp_path: Path) -> Path:
    small_compressed("llama", make_plan).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_merged_model_is_written(saved: Path, tmp_path: Path) -> None:
    result = run("export", saved, "-o", tmp_path / "merged", "--merge", "--json")
    size = sum(file.stat().st_size for file in (tmp_path / "merged").iterdir())
    assert json.loads(result.stdout) == {"directory": str(tmp_path / "merged"), "bytes": size, "merged": True}
    assert "it is neither smaller nor faster" in result.stderr
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config.model_type == "llama"


def test_without_merging_low_rank_pairs_are_refused(saved: Path, tmp_path: Path) -> None:
    assert "expected a plan that a stock config can say" in refused("export", saved, "-o", tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_a_place_in_use_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    assert "expected a new or empty directory" in refused("export", tmp_path / "nowhere", "-o", tmp_path, "--merge")
