"""``gac export``: its words, its JSON, its refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from transformers import AutoModelForCausalLM

import gac
from gac.plan.plan import Plan
from tests.checkpoint.exported import EXACT, uniform, words
from tests.checkpoint.test_deci import varied
from tests.cli.commands import answer, refused, run
from tests.compression.compressed import small_compressed


@pytest.fixture
def saved(make_plan: Callable[..., Plan], tmp_path: Path) -> Path:
    small_compressed("llama", make_plan).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_merged_model_is_written(saved: Path, tmp_path: Path) -> None:
    result = run("export", saved, "-o", tmp_path / "merged", "--merge", "--json")
    size = sum(file.stat().st_size for file in (tmp_path / "merged").iterdir())
    assert json.loads(result.stdout) == {
        "directory": str(tmp_path / "merged"),
        "bytes": size,
        "merged": True,
        "compressed_tensors": False,
        "deci": False,
    }
    assert "it is neither smaller nor faster" in result.stderr
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config.model_type == "llama"


def test_a_deci_is_written(make_plan: Callable[..., Plan], saved: Path, tmp_path: Path) -> None:
    gac.save(varied("mistral", make_plan), tmp_path / "varied", tokenizer=words())
    assert answer("export", tmp_path / "varied", "-o", tmp_path / "deci", "--deci")["deci"]
    assert json.loads((tmp_path / "deci" / "config.json").read_text())["architectures"] == ["DeciLMForCausalLM"]
    document = answer("export", tmp_path / "varied", "-o", tmp_path / "deci.gguf", "--deci", "--gguf")
    assert (document["architecture"], document["exact"]) == ("deci", True)
    message = refused("export", saved, "-o", tmp_path / "other", "--deci")
    assert "q_proj is low_rank with dim 16" in message
    assert "Plan with gac allocate MODEL --form narrow --form skip, without a scheme." in message


def test_a_place_in_use_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    assert "expected a new or empty directory" in refused("export", tmp_path / "nowhere", "-o", tmp_path, "--merge")


@pytest.fixture
def rounded(make_plan: Callable[..., Plan], tmp_path: Path) -> Path:
    gac.save(uniform("llama", make_plan, (*EXACT, "fp8")), tmp_path / "rounded", tokenizer=words())
    return tmp_path / "rounded"


def test_a_file_is_written_and_described(rounded: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    result = run("export", rounded, "--gguf", "-o", file)
    assert result.exit_code == 0, result.output
    assert f"writing {file.stat().st_size:,} bytes" in result.stderr
    assert f"saved as {file}, " in result.stdout.replace("\n", "")
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert kinds == {"F32", "Q4_0", "Q5_0", "Q8_0"}
    assert all(kind in result.stdout for kind in kinds)
    assert "fp8: llama.cpp rounds inputs in its own way" in result.stdout
    assert "is a GGUF file; expected a new file" in refused("export", rounded, "--gguf", "-o", file)
    document = answer("export", rounded, "--gguf", "-o", file, "--overwrite")
    assert (document["path"], document["bytes"], document["exact"]) == (str(file), file.stat().st_size, False)
    moved = {(row["scheme"], row["type"]): row["moved"] for row in document["tensors"]}
    assert moved.pop(("fp8", "Q8_0")) > 0
    assert set(moved.values()) == {0}


def test_a_file_and_a_directory_are_not_mixed_up(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "expected the path of a file" in refused("export", "saved", "--gguf", "-o", tmp_path)
    assert "is no directory" in refused("export", "saved", "-o", tmp_path / "model.gguf")
    result = run("export", "saved", "-o", tmp_path / "plain", "--overwrite")
    assert (result.exit_code, "--overwrite goes with --gguf." in result.stderr) == (2, True)


def test_pairs_are_refused_with_the_way_to_merge_them(saved: Path, tmp_path: Path) -> None:
    assert "expected a plan that a stock config can say" in refused("export", saved, "-o", tmp_path / "plain")
    message = refused("export", saved, "--gguf", "-o", tmp_path / "model.gguf")
    assert "q_proj is low_rank with dim 16" in message
    assert "Export it merged (--merge, merge=True)" in message
    assert {path.name for path in tmp_path.iterdir()} == {"saved"}
