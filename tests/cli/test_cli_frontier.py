"""``gac frontier`` on a tiny model, and on a file that it wrote."""

import json
from pathlib import Path

import pytest

from gac.allocation.frontier import Frontier, frontier
from tests.allocation.small_problems import PREFILL, problem
from tests.cli.commands import answer, refused, run


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    losses = [[8, 4, 2, 1, 0.5], [6, 3, 1.5, 0.75, 0.375]]
    frontier(problem(losses, [10, 20, 30, 40, 50, 60]), points=5).save(tmp_path / "saved.json")
    return tmp_path / "saved.json"


def test_it_writes_a_frontier_and_answers_with_it(directory: Path, text_file: Path, tmp_path: Path) -> None:
    target, figure = tmp_path / "new" / "frontier.json", tmp_path / "frontier.svg"
    options = ("--points", 7, "--calibration", f"{text_file}:4x64", "-o", target, "--plot", figure)
    result = run("frontier", directory, *options)
    assert result.exit_code == 0, result.output
    assert f"calibration on 4 windows of 64 tokens of {text_file}" in result.stderr
    assert result.stderr.endswith(f"saved as {target}\ndrawn in {figure}\n")
    assert "kept params loss perplexity prefill:1x1024 decode:1@1024" in " ".join(result.stdout.split())
    assert figure.read_bytes().startswith(b"<?xml")
    document, frontier = answer("frontier", directory, *options), Frontier.load(target)
    assert document["path"] == str(target)
    assert [point["params"] for point in document["points"]] == [point.params for point in frontier.points]
    assert (document["points"][-1]["kept"], document["dense"]["params"]) == (1.0, 92160)
    assert "sites" not in document
    assert {point.certificate.status for point in frontier.points} == {"optimal"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--points 1", "1 points; expected a whole number, 2 or more"),
        ("--limit decode:1@1024", "the profile lacks the latency of model.layers.0.self_attn.q_proj+k_proj+v_proj for"),
    ],
)
def test_it_refuses_before_anything_is_measured(
    options: str, message: str, directory: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("gac.measurement.session.measure_curves")
    target = tmp_path / "frontier.json"
    text = ("--calibration", f"{text_file}:4x64")
    assert f"Error: {message}" in refused("frontier", directory, *text, *options.split(), "-o", target)
    assert not target.exists()


def test_a_saved_frontier_is_shown_and_drawn_without_a_model(saved: Path, tmp_path: Path) -> None:
    result = run("frontier", saved, "--plot", tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes().startswith(b"\x89PNG")
    assert "5 points, 5 of them proved to lose least for their parameters" in result.stdout
    document = answer("frontier", saved)
    assert document["path"] == str(saved)
    assert (document["limit"], document["recipe"]["deployment"]["workloads"]) == ("params", [PREFILL, "decode:1@8"])
    assert document["dense"]["latency_ns"] == [120, 20]
    assert document["points"][0] | {"certificate": None} == {
        "asked": 0.166667,
        "limit": 48,
        "params": 48,
        "kept": 48 / 288,
        "bytes": 96,
        "bits": 16 * 48 / 288,
        "kv_numbers": 0,
        "together": 0.0,
        "loss": 14.0,
        "perplexity": pytest.approx(8886110.5),
        "latency_ns": [20, 120],
        "certificate": None,
    }


@pytest.mark.parametrize("option", [["--points", 5], ["--no-align"]])
def test_what_a_saved_frontier_does_not_heed_is_refused(saved: Path, option: list[object]) -> None:
    result = run("frontier", saved, *option)
    assert result.exit_code == 2
    assert f"goes with a model; {saved} is a saved frontier." in result.stderr


def test_a_file_that_is_no_frontier(saved: Path, tmp_path: Path) -> None:
    saved.write_text(json.dumps({"plan": 1}))
    result = run("frontier", saved)
    assert result.exit_code == 1
    assert f"Error: frontier {saved}: " in result.stderr
    missing = run("frontier", tmp_path / "none.json")
    assert f"frontier {tmp_path / 'none.json'} cannot be read: No such file or directory" in missing.stderr
