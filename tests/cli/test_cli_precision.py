"""Limits of memory and schemes on the command line, on a tiny model."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

import gac
from gac.profiling.sweeps.coverage import model_points
from tests.cli.commands import answer, refused, run, write_profile


@pytest.fixture
def text(text_file: Path) -> tuple[str, str]:
    return "--calibration", f"{text_file}:4x64"


def test_a_table_without_the_scheme_says_so_and_plans_by_memory(text: tuple[str, str], directory: Path) -> None:
    command = ("allocate", directory, *text, "--memory", 0.3, "--scheme", "w4a16", "-o", directory.parent / "plan.json")
    result = run(*command)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    assert "latency prefill:1x1024: unknown, the profile" in shown
    assert json.loads((directory.parent / "plan.json").read_text())["recipe"]["limits"]["latency"] == {}


def test_a_table_with_the_scheme_plans_by_latency(
    text: tuple[str, str], directory: Path, tiny_config: LlamaConfig, tmp_path: Path
) -> None:
    """A made-up table, in which a weight of 4 bits takes a third of the time."""
    points = model_points(tiny_config, schemes=("w4a16:32",))
    table = write_profile(tmp_path / "table.jsonl", points, lambda each: 8 if each.dtype == "w4a16:32" else 4000)
    command = ("allocate", directory, *text, "--scheme", "bf16", "--scheme", "w4a16:32", "--budget", 1, "--no-fuse")
    document = answer(*command, "--latency", 0.8, "--profile", table, "-o", tmp_path / "plan.json")
    for each in document["workloads"]:
        assert each["plan_ns"] <= 0.8 * each["dense_ns"]
        assert each["unknown"] == 0
    assert "w4a16:32" in {each.scheme for each in gac.Plan.load(tmp_path / "plan.json").weights}
    limits = ("--latency", 0.8, "--profile", table, "--scheme", "w3a16", "-o", tmp_path / "none.json")
    message = refused(*command, *limits)
    assert "Measure it with gac profile --model NAME" in message
    assert "--scheme w3a16" in message


def test_a_frontier_of_bytes(directory: Path, text: tuple[str, str], tmp_path: Path) -> None:
    schemes = ("--scheme", "bf16", "--scheme", "w8a16", "--scheme", "w4a16")
    target, figure = tmp_path / "frontier.json", tmp_path / "frontier.svg"
    command = ("--limit", "bytes", "--points", 6, *text, *schemes, "-o", target, "--plot", figure)
    document = answer("frontier", directory, *command)
    assert document["dense"]["bytes"] == 184_320
    for point in document["points"]:
        assert point["bytes"] <= point["limit"]
        assert point["bits"] == 8 * point["bytes"] / 92_160
        assert point["certificate"]["status"] == "optimal"
    assert document["points"][0]["bits"] < 4
    assert "proved to lose least for their bytes" in " ".join(run("frontier", target).stdout.split())
    assert figure.stat().st_size
