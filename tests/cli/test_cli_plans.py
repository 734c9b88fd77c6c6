"""Plans and frontiers on the command line: compared, verified, shown, drawn, and reported on."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from gac.allocation.frontier import Frontier
from gac.cli.plot import outcomes_of
from gac.plan.plan import Plan
from gac.profiling.table import Profile
from tests.allocation.small_problems import PREFILL
from tests.changed import with_measured
from tests.cli.commands import answer, ranks, refused, run, write_profile
from tests.compression.compressed import MakePlan
from tests.reporting.report_plans import by_rule, decided, whole_range


def allocated(directory: Path, text_file: Path, rule: str, *more: str) -> Path:
    target = directory.parent / f"{rule.replace(':', '-')}.json"
    result = run("allocate", directory, "--calibration", f"{text_file}:4x64", "--rule", rule, *more, "-o", target)
    assert result.exit_code == 0, result.output
    assert ("HiGHS agrees: " in result.stderr) == ("--solve-again" in more)
    return target


def test_plans_by_rule_are_compared_and_two_of_them_weight_by_weight(directory: Path, text_file: Path) -> None:
    rules = ("loss", "importance", "uniform", "uniform:down8")
    files = [allocated(directory, text_file, rule) for rule in rules]
    plans = [Plan.load(file) for file in files]
    best, *others = (plan.certificate for plan in plans)
    assert [proof.method for proof in others] == list(rules[1:])
    assert best.gap == 0
    assert all(proof.gap > 0 for proof in others)
    document = answer("compare", *files)
    assert [plan["path"] for plan in document["plans"]] == list(map(str, files))
    assert [plan["limits"][0]["over"] for plan in document["plans"]] == [plan.budget.over for plan in plans]
    assert "differences" not in document
    first = answer("compare", *files[2:])["differences"][0]
    assert first["first"]["weight"]["name"] == first["second"]["weight"]["name"] == "model.layers.0.self_attn.q_proj"
    assert (first["first"]["dim"], first["second"]["dim"]) == (25, 24)
    words = " ".join(run("compare", *files[2:]).stdout.split())
    assert "plan kept over loss perplexity prefill:1x1024 decode:1@1024 aligned" in words
    assert "14 of 14 weights differ, the 10 that differ most" in words


def test_solve_again_says_that_highs_agrees(directory: Path, text_file: Path) -> None:
    plan = Plan.load(allocated(directory, text_file, "loss", "--solve-again"))
    assert "; HiGHS agrees: it proved that none is better" in plan.certificate.method


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    whole_range([PREFILL, "decode:1@8"]).save(tmp_path / "saved.json")
    return tmp_path / "saved.json"


def test_frontier_writes_a_frontier_and_answers_with_it(directory: Path, text_file: Path, tmp_path: Path) -> None:
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
def test_a_frontier_is_refused_at_once(options: str, message: str, directory: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(directory.parent)
    monkeypatch.delattr("gac.measurement.session.measure_curves")
    assert f"Error: {message}" in refused("frontier", directory, *options.split(), "-o", "frontier.json")
    assert not Path("frontier.json").exists()


def test_a_saved_frontier_is_shown_and_drawn_without_a_model(saved: Path, tmp_path: Path) -> None:
    result = run("frontier", saved, "--plot", tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes().startswith(b"\x89PNG")
    assert "7 points, 7 of them proved to lose least for their parameters" in result.stdout
    document = answer("frontier", saved)
    assert document["path"] == str(saved)
    assert (document["limit"], document["recipe"]["deployment"]["workloads"]) == ("params", [PREFILL, "decode:1@8"])
    assert document["dense"]["latency_ns"] == [120, 20]
    expected = {
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
    assert expected.items() <= (document["points"][0] | {"certificate": None}).items()


def test_what_a_saved_frontier_does_not_heed_and_files_that_are_none_are_refused(saved: Path, tmp_path: Path) -> None:
    for option in (["--points", 5], ["--no-align"]):
        result = run("frontier", saved, *option)
        assert result.exit_code == 2
        assert f"goes with a model; {saved} is a saved frontier." in result.stderr
    saved.write_text('{"plan": 1}')
    assert f"Error: frontier {saved}: " in refused("frontier", saved)
    missing = refused("frontier", tmp_path / "none.json")
    assert f"frontier {tmp_path / 'none.json'} cannot be read: No such file or directory" in missing


H100 = "nvidia-h100-80gb-hbm3"


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    decided().save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_report_writes_a_page(plan: Path, tmp_path: Path) -> None:
    by_rule().save(tmp_path / "uniform.json")
    whole_range().save(tmp_path / "frontier.json")
    target = tmp_path / "new" / "report.html"
    options = ["--against", tmp_path / "uniform.json", "--frontier", tmp_path / "frontier.json", "-o", target]
    document = answer("report", plan, *options)
    assert document == {"path": str(target), "bytes": target.stat().st_size, "sites": 2}
    page = target.read_text(encoding="utf-8")
    assert "A GAC plan (plan) for the NVIDIA Test GPU" in page
    assert '<th scope="col" class="n">A, uniform</th>' in page


def test_the_profile_is_looked_up_by_its_digest(plan: Path, tmp_path: Path) -> None:
    target, shipped, recorded = tmp_path / "report.html", Profile.load(H100), decided()
    message = refused("report", plan, "--profile", H100, "-o", target)
    assert "expected 222222222222, the one that the plan was made with" in message
    assert not target.exists()
    assert "the latency table 222222222222 is not at hand" in run("report", plan, "-o", target).stderr
    with_measured(recorded, profile=replace(recorded.measured.profile, digest=shipped.digest)).save(plan)
    result = run("report", plan, "-o", target)
    assert (result.exit_code, "not at hand" in result.stderr) == (0, False)
    page = target.read_text(encoding="utf-8")
    assert f"driver {shipped.header.driver}" in page
    assert f" --profile {H100} --calibration " in page


MAGIC = {"pdf": b"%PDF", "png": b"\x89PNG", "svg": b"<?xml"}


@pytest.fixture
def places(make_plan: MakePlan, tiny_config: LlamaConfig, tmp_path: Path) -> dict[str, Path]:
    """A file of each kind that can be drawn."""
    plan = make_plan(tiny_config, {"model.layers.0.mlp.up_proj": ("low_rank", 24)})
    plan.save(tmp_path / "plan.json")
    with_measured(plan, digest="1" * 64).save(tmp_path / "elsewhere.json")
    points = whole_range()
    points.save(tmp_path / "frontier.json")
    points.plan(1).save(tmp_path / "point.json")
    measured = {"log_ratio": 0.25, "predicted_perplexity": 12.0, "perplexity": {"text": "wiki", "value": 13.0}}
    (tmp_path / "report.json").write_text(json.dumps({"models": [measured]}))
    write_profile(tmp_path / "gpu.jsonl", ranks(), lambda point: point.operation.axes["r"])
    return {path.stem: path for path in tmp_path.iterdir()}


def test_losses_of_a_report_are_compared_text_by_text(tmp_path: Path) -> None:
    def on(text: str, **predicted: float) -> dict[str, Any]:
        return {"perplexity": {"text": f"texts/{text}", "value": 13.0}, "log_ratio": 0.25} | predicted

    also = [on("news"), on("code", predicted_perplexity=13.0), "text"]
    models = [on("wiki", predicted_perplexity=26.0) | {"plan": {"healed": [{}]}, "also": also}]
    (tmp_path / "report.json").write_text(json.dumps({"models": models}))
    wiki, code = outcomes_of(tmp_path / "report.json")
    assert (wiki.name, code.name) == ("report, healed since, wiki", "report, healed since, code")
    assert (wiki.predicted, wiki.measured) == (pytest.approx(math.log(2) + 0.25), 0.25)
    assert (code.predicted, code.measured) == (0.25, 0.25)


FIGURES = (
    "plan PLAN --title $x_",
    "dims PLAN --weight up_proj",
    "heads PLAN",
    "frontier FRONTIER --plan POINT --beside FRONTIER",
    "prediction REPORT",
    "latency GPU --operator low_rank --shape m=1024 --dims 1000:1050 --title $x_",
    "atlas GPU",
    "alignment GPU",
    "published",
)


def arguments(words: str, places: dict[str, Path]) -> list[object]:
    return [places.get(word.lower(), word) if word.isupper() else word for word in words.split()]


@pytest.mark.parametrize(
    ("words", "ending"), [*((words, "pdf") for words in FIGURES), ("plan PLAN", "png"), ("plan PLAN", "svg")]
)
def test_each_figure_is_written(words: str, ending: str, places: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "new" / f"figure.{ending}"
    document = answer("plot", *arguments(words, places), "-o", target)
    assert document == {"figure": str(target), "kind": words.split()[0]}
    assert target.read_bytes().startswith(MAGIC[ending])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan PLAN -o figure.gif", "figure figure.gif ends in '.gif'; expected one of .png, .pdf, .svg."),
        ("dims PLAN ELSEWHERE -o x.png", "beside one for tiny (111111111111); expected plans for the"),
        ("latency GPU --operator sdpa -o x.png", "no sweep of gpu is of sdpa; expected one of its 1, "),
        ("layer PLAN --profile GPU -o x.png", "plan for tiny names no workload; expected one"),
        ("layer PLAN --profile GPU --workload prefill:1x8 -o x.png", "profile gpu lacks linear bf16 m=8 k=64 n=64, wh"),
        ("prediction PLAN -o x.png", "has no predicted and measured loss; expected a report of gac eval"),
        ("prediction none.json -o x.png", "report none.json cannot be read: "),
    ],
)
def test_what_cannot_be_drawn(words: str, message: str, places: dict[str, Path], monkeypatch: Any) -> None:
    monkeypatch.chdir(places["plan"].parent)
    assert message in refused("plot", *arguments(words, places))
    assert not Path("x.png").exists()
