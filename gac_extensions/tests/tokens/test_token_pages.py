"""Plans of tokens in figures, on the page and in comparisons."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

import gac
from gac import plots
from gac.core.errors import GacError, PlanError
from gac.plan.plan import Plan, WorkloadLatency
from gac_extensions.report.render import report_page
from gac_extensions.report.sources import Sources
from gac_extensions.tests.tokens.test_token_plan import curves, plan_of
from gac_extensions.tokens.page import tokens_page, tokens_section
from gac_extensions.tokens.plan import TokenPlan, load_plans
from tests.cli.commands import refused, run
from tests.reporting.rendering import legend
from tests.reporting.report_plans import decided
from tests.reporting.test_report_page import words

TIMED = WorkloadLatency("decode:1@64", 4000, 2600, 3, 1, 0)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    pyplot.close("all")


@pytest.fixture
def plan() -> TokenPlan:
    return plan_of(curves(4), 4 * 32, workloads=(TIMED,), whole=(4,), window=16)


@pytest.fixture
def files(plan: TokenPlan, tmp_path: Path) -> list[Path]:
    """Two plans of tokens and one of weights."""
    paths = [tmp_path / name for name in ("half.json", "more.json", "weights.json")]
    for source, path in zip((plan, plan_of(curves(4), 4 * 48), decided()), paths, strict=True):
        source.save(path)
    return paths


def test_plan_as_text_and_rows(plan: TokenPlan) -> None:
    lines = [" ".join(line.split()) for line in repr(plan).splitlines()]
    assert lines[0] == "layer tokens share loss"
    assert "kept 128 of 256 tokens (0.5000), limit 128" in lines
    assert [row["kept"] for row in plan.rows()] == [layer.kept for layer in plan.layers]
    assert "<b>" not in replace(plan, text="<b>")._repr_html_()


def heights(ax: Any) -> list[list[float]]:
    return [
        [float(height) for height in line.get_ydata()] for line in ax.lines if line.get_marker() not in ("None", "")
    ]


def test_figures(plan: TokenPlan, files: list[Path]) -> None:
    ax = plots.tokens({"half": plan, "more": files[1]})
    assert legend(ax) == ["half", "more"]
    assert heights(ax) == [[float(layer.kept) for layer in TokenPlan.load(path).layers] for path in files[:2]]
    assert ax.get_ylabel() == "tokens kept of 64"
    assert heights(plots.token_losses({"half": plan})) == [[layer.loss for layer in plan.layers if layer.loss]]
    assert heights(plots.token_losses({"all": plan_of(curves(4), 4 * 64)})) == [[]]
    assert len(plots.figure_of_tokens({"half": plan}).axes) == 2
    with pytest.raises(PlanError, match="expected plans for the same model"):
        plots.tokens({"half": plan, "other": replace(plan, digest="other")})
    with pytest.raises(GacError, match="0 plans in one figure"):
        plots.tokens({})


def test_page_of_tokens(plan: TokenPlan) -> None:
    text = words(tokens_page(plan, "half", {"more": plan_of(curves(4), 4 * 48)}))
    for expected in (
        "Kept: 128 of 256 tokens (0.5000), limit 128.",
        "Latency: decode:1@64: attention 2.6 µs of 4.0 µs dense (0.650x; 3 measured, 1 interpolated).",
        "Whole: 1 layer of a window of 16 tokens, which no limit of tokens counts.",
        "gac tokens tiny --keep 0.5 --press tiny --calibration tiny:1x72 --following 8 --step 8 --share 0.125",
        "more tiny 0.7500",
    ):
        assert expected in text
    page = tokens_page(replace(plan, model="<b>x</b>"))
    assert page.count(" chosen s") == 4
    assert "<b>x" not in page


def test_page_of_weights_with_a_plan_of_tokens(make_plan: Any, tiny_config: Any) -> None:
    weights = make_plan(tiny_config, {"model.layers.0.self_attn.k_proj": ("latent:1", 8)})
    (used, total), (first, second) = weights.kv_numbers, (24, 64)
    kept = plan_of(curves(2), first + second, digest=weights.measured.digest)
    layers = tuple(replace(layer, kept=count) for layer, count in zip(kept.layers, (first, second), strict=True))
    page = report_page(Sources(weights, tokens=tokens_section(replace(kept, layers=layers), weights)))
    both = (used - total // 2) * first + total // 2 * second
    assert f"64 tokens take {both:,} of {total * 64:,} numbers of 16 bits ({both / total / 64:.4f})" in words(page)
    assert page.count(" chosen s") == 2
    assert 'href="#tokens"' in page
    assert 'href="#tokens"' not in report_page(Sources(weights))


def test_report_and_plot(files: list[Path], tmp_path: Path) -> None:
    page, figure = tmp_path / "page.html", tmp_path / "figure.png"
    document = json.loads(run("report", files[0], "--against", files[1], "-o", page, "--json").stdout)
    assert document["layers"] == 4
    assert "a GAC plan of tokens kept</title>" in page.read_text()
    run("plot", "tokens", *files[:2], "-o", figure)
    assert figure.stat().st_size > 1000
    assert gac.report(files[0], page, name="half") == page


def test_compare(files: list[Path]) -> None:
    output = " ".join(run("compare", *files[:2]).stdout.split())
    assert "half tiny 0.5000" in output
    assert "0.650x" in output
    assert "layers keep another number of tokens" in output
    document = json.loads(run("compare", *files[:2], "--json").stdout)
    assert [entry["used"] for entry in document["plans"]] == [128, 192]
    assert document["plans"][0]["cache_bytes"]["64"]["used"] < document["plans"][0]["cache_bytes"]["64"]["total"]


def test_plans_of_two_kinds(files: list[Path], plan: TokenPlan, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert load_plans([files[0], plan]) == [plan, plan]
    assert isinstance(load_plans([files[2]])[0], Plan)
    with pytest.raises(PlanError, match="missing"):
        load_plans(["missing.json"])
    assert "another kind" in refused("compare", files[0], files[2])
    assert "another kind" in refused("compare", files[2], files[0])
    assert "another kind" in refused("report", files[2], "--against", files[0], "-o", page)
    message = refused("report", files[0], "--profile", "nvidia-h100-80gb-hbm3", "-o", page)
    assert "a plan of tokens kept beside a frontier, a latency table, measurements or another plan of tokens" in message
    other = "plan weights for tiny beside a plan of tokens for tiny; expected plans for the same weights"
    assert other in refused("report", files[2], "--tokens", files[0], "-o", page)
