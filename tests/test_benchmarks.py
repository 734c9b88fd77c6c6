"""Benchmark scripts start, and what they name exists; what they measure is right, small and large."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaForCausalLM

from gac.core.operations import linear
from gac.profiling.records import Point
from gac.profiling.table import Profile
from tests.benchmarks import batch, cache, cache_bytes, killed_ranks, load, scale
from tests.cli.commands import refused

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "tests/benchmarks").rglob("*.py"))


def missing(module: ModuleType, path: Path) -> list[str]:
    """The attributes of imported modules that a script reads or replaces, and that do not exist."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module=str(source)) if source.partition(".")[0] in ("gac", "tests"):
                exec(ast.unparse(node), {})  # also of imports within functions
            case ast.Attribute(value=ast.Name(id=owner), attr=attribute):
                names.append((owner, attribute))
            case ast.Call(func=ast.Attribute(attr="object"), args=[ast.Name(id=owner), ast.Constant(attribute), *_]):
                names.append((owner, attribute))
            case ast.Call(func=ast.Attribute(attr="multiple"), args=[ast.Name(id=owner)], keywords=replaced):
                names += [(owner, keyword.arg or "") for keyword in replaced]
    owners = {name: value for name, value in vars(module).items() if isinstance(value, (ModuleType, type))}
    return [f"{owner}.{name}" for owner, name in names if owner in owners and not hasattr(owners[owner], name)]


@pytest.mark.slow
def test_scripts_start_and_name_what_exists(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for path in SCRIPTS:
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        assert (path.name, missing(module, path)) == (path.name, [])
        source = path.read_text(encoding="utf-8")
        if hasattr(module, "main") and ("ArgumentParser" in source or "options(" in source):
            monkeypatch.setattr(sys, "argv", [str(path), "--help"])
            with pytest.raises(SystemExit, match="0"):
                module.main()
            assert "--help" in capsys.readouterr().out
    assert all(hasattr(owner, name) for _, owner, name in scale.PARTS)
    for phase in killed_ranks.PHASES:
        owner, _, name = phase.function.rpartition(".")
        module = importlib.import_module(phase.module)
        assert hasattr(getattr(module, owner) if owner else module, name)


def test_a_profile_of_many_chunks_keeps_its_rows_passes_and_lookups(tmp_path: Path) -> None:
    load.write_profile(tmp_path / "p.jsonl", rows=12_000, passes=3)
    profile = Profile.load(tmp_path / "p.jsonl")
    assert len(profile.measurements) == 12_000
    row = profile.measurements[11_000]
    assert (row.shape, row.passes) == ({"m": 1024, "k": 4098, "n": 1001}, (20_910.5, 20_253.0, 20_253.0))
    assert profile.find(Point(linear(1024, 4098, 1001))) == row
    assert profile.find(Point(linear(1024, 4098, 9001))) is None
    assert len(profile.rows_of("linear", {"m": 1024, "k": 4097}, "n")) == 5000


@pytest.mark.slow
def test_a_profile_of_a_million_rows_takes_less_than_a_gigabyte() -> None:
    done = subprocess.run([sys.executable, load.__file__, "profile"], capture_output=True, text=True, check=True)
    what, _, gigabytes = done.stdout.rpartition(", ")
    assert what.startswith("a profile of 1,000,000 rows, 1 passes, 216 MB, opened: ")
    assert float(gigabytes.removesuffix(" GB\n")) < 1


def test_a_point_that_is_there_again_thousands_of_lines_later_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    load.write_profile(path, rows=5000, passes=1)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[100]]))
    assert f"{path}:5066: linear {{'m': 1024, 'k': 4096, 'n': 36}} is there twice" in refused("cliffs", path)


def test_a_choice_for_a_model_of_llama_3_70b_size_is_proved_optimal() -> None:
    _, what = load.plan()
    assert what == "a choice for 560 sites among 291,440 candidates, proved optimal"


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
