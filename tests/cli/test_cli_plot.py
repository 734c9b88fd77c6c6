"""``gac plot``: every figure is written, and what cannot be drawn is refused in words."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from gac.allocation.frontier import frontier
from gac.plan.plan import Plan
from tests.allocation.small_problems import problem
from tests.changed import with_measured
from tests.cli.commands import answer, ranks, refused, write_profile
from tests.compression.compressed import MakePlan

MAGIC = {"pdf": b"%PDF", "png": b"\x89PNG", "svg": b"<?xml"}


@pytest.fixture
def plan(make_plan: MakePlan, tiny_config: LlamaConfig) -> Plan:
    return make_plan(tiny_config, {"model.layers.0.mlp.up_proj": ("low_rank", 24)})


@pytest.fixture
def places(plan: Plan, tmp_path: Path) -> dict[str, Path]:
    """A file of each kind that can be drawn."""
    plan.save(tmp_path / "plan.json")
    with_measured(plan, digest="1" * 64).save(tmp_path / "elsewhere.json")
    points = frontier(problem([[8, 4, 2, 1, 0.5]], [10, 20, 30, 40, 50, 60]), points=5)
    points.save(tmp_path / "frontier.json")
    points.plan(1).save(tmp_path / "point.json")
    (tmp_path / "report.json").write_text(json.dumps({"models": [{"predicted": 0.2, "log_ratio": 0.25}]}))
    write_profile(tmp_path / "gpu.jsonl", ranks(), lambda point: point.operation.axes["r"])
    return {path.stem: path for path in tmp_path.iterdir()}


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
def test_what_cannot_be_drawn(
    words: str, message: str, places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused("plot", *arguments(words, places))
    assert not (tmp_path / "x.png").exists()
