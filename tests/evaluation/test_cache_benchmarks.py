"""The benchmarks of the KV cache: what is rounded, and the bytes that run."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.benchmarks import batch, cache, cache_bytes


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("GROUP", 8), ("EXACT", 16), ("PALU", "fisher:nearest8")):
        monkeypatch.setattr(cache, name, value)


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("bits", [4, 8])
def test_a_rounded_cache_is_what_decoding_token_by_token_reads(tiny_model: LlamaForCausalLM, bits: int) -> None:
    query = torch.randn(1, 4, 40, 16)
    key, value = torch.randn(2, 1, 2, 40, 16)
    mask = torch.full((40, 40), -torch.inf).triu(1)[None, None]
    output, _ = cache.attend_rounded(bits, None, query, key, value, mask, 0.25)
    for token in (0, 15, 16, 39):
        quantized, old = token // cache.EXACT * cache.EXACT, max(0, token - cache.EXACT)
        keys = torch.cat((cache.rounded(key[:, :, :quantized].mT, bits).mT, key[:, :, quantized : token + 1]), 2)
        values = torch.cat((cache.rounded(value[:, :, :old], bits), value[:, :, old : token + 1]), 2)
        keys, values = (states.repeat_interleave(2, 1) for states in (keys, values))
        expected = (query[:, :, token : token + 1] @ keys.mT * 0.25).softmax(-1) @ values
        assert torch.allclose(output[:, token], expected[:, :, 0], atol=1e-5)


def test_rounding_to_a_group_of_few_numbers_keeps_its_ends(small_groups: None) -> None:
    values = torch.linspace(-1, 3, 16)
    quantized = cache.rounded(values, 4)
    assert torch.allclose(quantized[::7][:2], values[::7][:2])
    assert (quantized - values).abs().max() <= 7 * 4 / 15 / 15 / 2 + 1e-6
    assert torch.allclose(cache.rounded(torch.ones(8), 4), torch.ones(8))


@pytest.mark.slow
def test_the_cache_that_runs_has_the_planned_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "bytes.json"
    arguments = ["--device", "cpu", "--shapes", "smollm2", "--layers", "2", "--tokens", "24", "--shares", "0.5"]
    monkeypatch.setattr("sys.argv", ["cache_bytes", "--output", str(output), *arguments])
    cache_bytes.main()
    rows = json.loads(output.read_text())["rows"]
    assert [(row["form"], row["cache"]) for row in rows] == [
        (form, kind) for form in ("dense", "latent:1", "latent:1:int8") for kind in ("dynamic", "static")
    ]
    assert all(row["bytes"] == row["planned"] for row in rows)
    assert rows[0]["planned"] == 2 * 24 * 2 * 2 * 192
    assert all(row["planned"] <= rows[0]["planned"] / 2 and row["dims"] for row in rows[2:])


def test_every_task_of_the_batch_can_begin(tmp_path: Path) -> None:
    described = json.loads((batch.BATCHES / "cache.json").read_text(encoding="utf-8"))
    tasks = list(batch.tasks_of(described, tmp_path))
    names = [task.name for task in tasks]
    assert len(set(names)) == len(names)
    for position, task in enumerate(tasks):
        assert all(any(task.waits_for(name) for name in names) for _ in task.after[:1])
        assert [name for name in names[position:] if task.waits_for(name)] == []
