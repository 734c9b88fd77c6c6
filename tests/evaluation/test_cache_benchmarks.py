"""What measures the KV cache, on a small model and a CPU: all of it runs, goes on, and says what was planned."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.benchmarks import batch, cache, cache_bytes


def told(module: Any, monkeypatch: pytest.MonkeyPatch, output: Path, *given: str) -> dict[str, Any]:
    """What the script writes."""
    monkeypatch.setattr(sys, "argv", [module.__name__, "--output", str(output), *given])
    module.main()
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("GROUP", 8), ("EXACT", 16), ("PALU", "fisher:nearest8")):
        monkeypatch.setattr(cache, name, value)


@pytest.mark.usefixtures("small_groups")
def test_every_way_is_measured_at_every_length_and_the_same_command_goes_on(
    directory: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--model", str(directory), "--calibration", f"{text_file}:4x64", "--text", str(text_file)]
    given += ["--windows", "2", "--lengths", "64", "128", "--caches"]
    told(cache, monkeypatch, tmp_path / "rows.json", *given, "0.5", "--ways", "latent")
    found = told(cache, monkeypatch, tmp_path / "rows.json", *given, "0.5", "0.75")
    rows = found["rows"]
    ways = [
        (row["way"], row.get("bits", row["budget"] if row["way"] == "palu" else row.get("kv_cache"))) for row in rows
    ]
    assert ways == [
        *(("latent", 0.5), ("latent", 0.75), ("latent:int8", 0.25), ("latent:int8", 0.375)),
        *(("latent:int8+int4", 0.25), ("latent:int8+int4", 0.375)),
        *(("palu", 0.5), ("palu", 0.75), ("head_dim", 0.5), ("head_dim", 0.75), ("kivi", 8), ("kivi", 4)),
    ]
    assert [row["way"] for row in rows if "refused" in row] == ["head_dim"]
    measured = [row for row in rows if "refused" not in row]
    assert all(list(row["perplexities"]) == ["64", "128"] for row in measured)
    assert all(row["perplexity"] == row["perplexities"]["64"] for row in measured if row["way"] != "kivi")
    assert all(
        row["measured"] == pytest.approx(math.log(row["perplexities"]["64"] / found["dense"])) for row in measured
    )
    assert all(row["cache"] <= row["kv_cache"] for row in measured if "kv_cache" in row)
    lines = [line for line in capsys.readouterr().out.rpartition("---")[2].splitlines() if line.startswith("| ")]
    assert len(lines) == 2 * len(measured) + 1
    assert len([line for line in lines if not line.endswith("|  |")]) == 2 * 4  # rounded latents over those of 16 bits
    with pytest.raises(SystemExit, match=r"rows\.json was measured with .*'refit': None"):
        told(cache, monkeypatch, tmp_path / "rows.json", *given, "0.5", "--refit", "none")


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("bits", [4, 8])
def test_a_rounded_cache_is_what_decoding_token_by_token_reads(tiny_model: LlamaForCausalLM, bits: int) -> None:
    query = torch.randn(1, 4, 40, 16)
    key, value = torch.randn(2, 1, 2, 40, 16)
    mask = torch.full((40, 40), -torch.inf).triu(1)[None, None]
    found, _ = cache.attend_rounded(bits, None, query, key, value, mask, 0.25)
    for token in (0, 15, 16, 39):
        whole, old = token // cache.EXACT * cache.EXACT, max(0, token - cache.EXACT)
        keys = torch.cat((cache.rounded(key[:, :, :whole].mT, bits).mT, key[:, :, whole : token + 1]), 2)
        values = torch.cat((cache.rounded(value[:, :, :old], bits), value[:, :, old : token + 1]), 2)
        keys, values = (one.repeat_interleave(2, 1) for one in (keys, values))
        expected = (query[:, :, token : token + 1] @ keys.mT * 0.25).softmax(-1) @ values
        assert torch.allclose(found[:, token], expected[:, :, 0], atol=1e-5)


def test_rounding_to_a_group_of_few_numbers_keeps_its_ends(small_groups: None) -> None:
    values = torch.linspace(-1, 3, 16)
    found = cache.rounded(values, 4)
    assert torch.allclose(found[::7][:2], values[::7][:2])
    assert (found - values).abs().max() <= 7 * 4 / 15 / 15 / 2 + 1e-6
    assert torch.allclose(cache.rounded(torch.ones(8), 4), torch.ones(8))


def test_the_cache_that_runs_has_the_planned_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--device", "cpu", "--shapes", "smollm2", "--layers", "2", "--tokens", "24", "--shares", "0.5"]
    for _ in range(2):
        rows = told(cache_bytes, monkeypatch, tmp_path / "bytes.json", *given)["rows"]
        assert [(row["form"], row["cache"]) for row in rows] == [
            (form, kind) for form in ("dense", "latent:1", "latent:1:int8") for kind in ("dynamic", "static")
        ]
        assert all(row["bytes"] == row["planned"] for row in rows)
    assert rows[0]["planned"] == 2 * 24 * 2 * 2 * 192
    assert all(row["planned"] <= rows[0]["planned"] / 2 for row in rows[2:])
    assert all(row["dims"] for row in rows[2:])


def test_every_task_of_the_batch_can_begin(tmp_path: Path) -> None:
    """What it waits for is there, and stands before it."""
    described = json.loads((batch.BATCHES / "cache.json").read_text(encoding="utf-8"))
    tasks = list(batch.tasks_of(described, tmp_path))
    names = [task.name for task in tasks]
    assert len(set(names)) == len(names)
    for at, task in enumerate(tasks):
        assert all(any(task.waits_for(name) for name in names) for _ in task.after[:1])
        assert [name for name in names[at:] if task.waits_for(name)] == []
