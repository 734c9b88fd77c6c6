"""Repair on the command line."""

from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from gac_extensions.tests.repairs.checkpoints import factored, svd_llm, write
from tests.cli.commands import answer, run

H100 = ("--profile", "nvidia-h100-80gb-hbm3")


@pytest.fixture
def theirs(tiny_model: LlamaForCausalLM, tmp_path: Path) -> Path:
    """Every weight as two factors of rank 13, as SVD-LLM stores them."""
    return write(tmp_path / "theirs", tiny_model.config, factored(tiny_model, 13, svd_llm))


def test_the_tables_and_the_document(theirs: Path, tmp_path: Path) -> None:
    result = run("repair", theirs, "-o", tmp_path / "ours", *H100)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "model.layers.*.mlp.down_proj 2 13 16 23.08% 5,760" in lines
    assert "dims 14 of 14 moved, 0 kept that are no multiple of 8" in lines
    assert "prefill:1x1024 predicted unknown: 14 of 14 GEMMs unknown: 14 of 14 GEMMs" in lines
    assert (tmp_path / "ours" / "config.json").is_file()
    document = answer("repair", theirs, "-o", tmp_path / "optimal", "--strategy", "optimal", *H100)
    assert document["contract"]["strategy"] == "optimal"
    assert len(document["moved"]) == document["dims"] == 14
    assert document["bytes_after"] - document["bytes_before"] == document["added_bytes"]
    assert [row["workload"] for row in document["times"]] == ["prefill:1x1024", "decode:1@1024"]
