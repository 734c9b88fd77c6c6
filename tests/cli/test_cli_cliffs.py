"""``gac cliffs`` on a small recorded profile: table, document, figure, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import answer, ranks, refused, run, write_profile


def test_the_table_names_each_sweep_its_period_its_causes_and_single_dims(recorded: Path) -> None:
    shown = " ".join(run("cliffs", recorded).stdout.split())
    assert "low_rank bf16 m=1024 k=4096 n=4096, r 129 112 " in shown
    assert "causes of the 112 collapsed dims: alignment tier 100.0%" in shown
    assert "low_rank bf16 m=1024 k=4096 n=4096, r 8 4.99* 2.50* 2.50* 1.00 0.99 -" in shown
    shown = " ".join(run("cliffs", recorded, "--dims", "1023:1024").stdout.split())
    assert "1023 151.2 0.1 5.00x 1024 alignment tier cutlass_75_tensorop" in shown
    assert "1024 30.2 0.0 nvjet_sm90" in shown


def test_the_document_has_the_period_and_each_collapsed_dim_with_its_cause(recorded: Path) -> None:
    (sweep,) = answer("cliffs", recorded, "--dims", "1022:1024")["sweeps"]
    assert (sweep["operator"], sweep["axis"], sweep["period"], sweep["points"]) == ("low_rank", "r", 8, 129)
    odd = sweep["alignment"][0]
    assert (odd["step"], odd["against"], odd["dims"], odd["keeps_up"]) == (1, 8, 64, False)
    assert odd["low"] <= odd["slowdown"] <= odd["high"]
    rows = [(row["dim"], row["rescue"], row["cause"]["kind"]) for row in sweep["collapsed"]]
    assert rows == [(1022, 1024, "alignment tier"), (1023, 1024, "alignment tier")]
    assert [point["dim"] for point in sweep["measured"]] == [1022, 1023, 1024]
    assert sweep["measured"][2]["launches"][0]["grid"] == [132, 1, 1]


def test_the_document_has_each_edge_of_a_staircase_with_its_cause() -> None:
    choice = ("--operator", "linear_rowwise", "--axis", "n", "--shape", "m=1024,k=4096")
    (sweep,) = answer("cliffs", "nvidia-h100-80gb-hbm3", *choice)["sweeps"]
    (step,) = (step for step in sweep["staircase"] if step["sweet_spot"] == 2048)
    assert (step["edge"], step["cause"]["kind"]) == (2112, "wave")
    assert "136 tiles in 2 waves, " in step["cause"]["evidence"]


def test_sweeps_are_chosen_by_dtype(tmp_path: Path) -> None:
    points = [*ranks(), *(replace(point, dtype="w4a16") for point in ranks())]
    path = write_profile(tmp_path / "both.jsonl", points, lambda point: point.operation.axes["r"])
    assert [sweep["dtype"] for sweep in answer("cliffs", path)["sweeps"]] == ["bf16", "w4a16"]
    chosen = ("--operator", "low_rank", "--dtype", "w4a16")
    (sweep,) = answer("cliffs", path, *chosen)["sweeps"]
    assert (sweep["dtype"], sweep["period"]) == ("w4a16", 8)
    kinds = {row["rescue"] % 32 == 0: row["cause"]["kind"] for row in sweep["collapsed"]}
    assert kinds == {True: "no kernel", False: "alignment tier"}  # kernels of w4a16 read multiples of 32
    assert run("plot", "latency", path, *chosen, "-o", tmp_path / "x.png").exit_code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--shape m=3", "any operator m=3"),
        ("--axis k --operator linear", "linear along k"),
        ("--dtype w4a16", "any operator w4a16"),
        ("--operator low_rank --dims 1:9", "low_rank dims 1:9"),
    ],
)
def test_a_choice_that_matches_nothing(options: str, words: str, recorded: Path) -> None:
    message = refused("cliffs", recorded, *options.split())
    assert f"Error: no sweep of recorded is of {words}; expected one of its 1" in message
    assert ("or measure it with gac profile --scheme." in message) == ("w4a16" in words)


def test_figures_of_the_chosen_sweeps_and_of_all(recorded: Path, tmp_path: Path) -> None:
    figure, page = tmp_path / "cliffs.svg", tmp_path / "page.svg"
    shape = "m = 1024, k=4096,n=4096"
    assert run("cliffs", recorded, "--shape", shape, "--plot", figure).stderr == f"drawn in {figure}\n"
    assert run("cliffs", recorded, "--plot", page).exit_code == 0
    assert "NVIDIA Test GPU, PyTorch 2.11.0, CUDA 13.0" in page.read_text()
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".part"] == []


def test_a_profile_that_is_unknown_or_has_no_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = write_profile(tmp_path / "short.jsonl", ranks(range(8, 64, 8)), lambda point: 8)
    assert "profile short has no sweep; expected at least 8 dims along one axis" in refused("cliffs", short)
    monkeypatch.setattr("gac.profiling.folders.shipped_profiles", lambda: (Path("nvidia-h100-80gb-hbm3.jsonl"),))
    monkeypatch.setenv("GAC_HOME", str(tmp_path))
    result = run("cliffs", "nvidia-h100", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"] == {
        "given": "profile 'nvidia-h100' is neither a file nor a known name",
        "expected": "a path, or one of nvidia-h100-80gb-hbm3",
        "remedy": "Did you mean 'nvidia-h100-80gb-hbm3'? A GPU without a table is measured with gac profile, on that "
        "GPU.",
    }
