"""The page as text: what it answers, what it escapes, what belongs together, and why a site is what it is."""

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from textwrap import fill
from typing import Any

import pytest

import gac
import gac.plots
from gac.allocation.frontier import frontier
from gac.checkpoint.card import model_card
from gac.core.errors import PlanError
from gac.core.io import to_json
from gac.core.words import duration, nats, ranges
from gac.core.workloads import Workload
from gac.models.sites import Weight
from gac.plan.layers import legend_of
from gac.plan.plan import CalibrationPart, Candidate, Limit, Plan, SiteChoice, TextPrediction, WeightChoice
from gac.profiling.table import Profile
from gac_extensions.lab.shapes.models import planner_of_shapes
from gac_extensions.report.charts import charts
from gac_extensions.report.measured import MeasuredText, read_measured
from gac_extensions.report.reasons import next_dims, reasons, trades
from gac_extensions.report.render import report_page
from gac_extensions.report.sources import Sources
from gac_extensions.report.tables import about_dense, stayed_dense
from gac_extensions.report.verdicts import verdicts
from tests.allocation.small_problems import DECODE, PREFILL, measured, problem, profile
from tests.changed import changed_recipe, with_measured, with_recipe
from tests.reporting.report_plans import LOSSES, SLOPE, by_rule, decided, renamed, rounded, rounding, whole_range


def page_of(plan: Plan, **beside: Any) -> str:
    return report_page(Sources(plan, **beside))


def words(page: str) -> str:
    """What is read: no tags, one space between words."""
    body = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())


def cells(page: str) -> list[dict[str, Any]]:
    match = re.search(r'<script type="application/json" id="cells">(.*?)</script>', page, re.DOTALL)
    assert match
    entries: list[dict[str, Any]] = json.loads(match[1])
    return entries


def test_it_answers_from_the_page_alone() -> None:
    page = page_of(decided())
    text = words(page)
    assert "Parameters 192 of 288 targeted: 0.6667 kept, 0.667 asked, 192 allowed; 0.9904 of the whole model" in text
    assert "Limit, parameters 192 of 288 (0.667); 0 left" in text
    assert "optimal: within the limits, no choice of the candidates loses less" in text
    assert "Profile NVIDIA Test GPU, 222222222222" in text
    assert "gac allocate tiny --budget 0.667 --method kfac --form low_rank" in text
    assert "No weight stayed dense." in text
    assert " to 0.667 of its targeted parameters: a GAC plan</title>" in page
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", page)
    assert "http" not in page.replace("http-equiv", "")
    assert "default-src 'none'" in page


def test_every_cell_has_form_params_loss_latency_and_reasons() -> None:
    cell = cells(page_of(decided()))[0]
    assert cell["label"] == "layer 0, site0: low_rank\N{NO-BREAK SPACE}4, 67% kept"
    assert dict(cell["facts"]) == {
        "Weight": "site0, 12 x 12",
        "Becomes": "low_rank\N{NO-BREAK SPACE}4",
        "Parameters": "96 of 144 (66.7%)",
        "Bytes": "192 of 288 (10.67 bits a dense parameter)",
        "Loss": "+1 nats a token",
        "prefill:1x8": "40 ns",
    }
    assert cell["reasons"][0].startswith("Why not smaller: ")


def test_other_plans_stand_beside_it_and_a_rule_says_how_far_it_is_from_the_best() -> None:
    page = page_of(decided(), name="ours", against={"theirs": by_rule()})
    assert ["In theirs", "low_rank\N{NO-BREAK SPACE}3"] in cells(page)[0]["facts"]
    assert "Plan P, ours A, theirs Kept 0.6667 0.5000 Over 0 0 Loss" in words(page)
    assert "Proof optimal optimal Weights that differ 2" in words(page)
    plan = by_rule()
    proof = replace(plan.certificate, status="feasible", lower_bound=plan.certificate.value - 0.5, gap=0.5)
    said = words(page_of(replace(plan, certificate=proof)))
    assert "the rule uniform made the choice, at most 0.500 nats a token (" in said


def test_a_frontier_is_drawn_and_its_other_settings_are_said() -> None:
    plan, points = decided(), whole_range()
    page = page_of(plan, frontier=points)
    assert page.count('class="dot"') == 2 * len(points.readable())
    assert "The frontier was made otherwise" not in page
    unlike = words(page_of(with_recipe(plan, refit="residual", shots=2), frontier=points))
    assert "made otherwise than the plan, with refit none instead of residual, shots 1 instead of 2." in unlike
    page = page_of(rounded(), frontier=frontier(rounding(budget=1.0), points=5, limit="bytes"))
    assert "within one limit on the bytes:" in words(page)
    assert "Perplexity against bytes" in words(page)
    assert page.count('class="line"') == 1


def test_times_rates_and_perplexity_come_first() -> None:
    said = words(page_of(decided()))
    time = (
        "Summary Time over dense, prefill:1x8 0.667x 100,000,000 tokens/s, 66,666,667 dense; 80 ns of 120 ns; targeted"
    )
    assert f"{time} weights alone Predicted perplexity 42.52 7.39 dense; 5.755x Whole model" in said


def test_a_plan_that_the_dense_model_or_the_frontier_beats_says_so_first() -> None:
    plan = decided(workloads=[PREFILL, DECODE])
    assert verdicts(Sources(decided())) == ()
    (slower,) = verdicts(Sources(plan))
    assert slower == (
        "The dense model is faster at decode:1@8, and loses nothing: the plan takes 3.000 times as long, and its "
        "perplexity is 5.755 times as high (predicted). It saves memory alone there: 19.8 kB instead of 20.0 kB for "
        "the model."
    )
    assert f"Summary {slower} Time over dense" in words(page_of(plan))
    measured = Sources(plan, measured=(MeasuredText("wiki", 10.0, 12.0),))
    assert "its perplexity is 1.200 times as high (measured)" in verdicts(measured)[0]
    assert verdicts(replace(measured, measured=(MeasuredText("wiki", 10.0, 9.0),))) == ()
    halved = frontier(problem([[loss / 2 for loss in losses] for losses in LOSSES], SLOPE), points=7)
    assert verdicts(Sources(decided(), frontier=halved)) == (
        "The frontier has a better choice, at 0.7222 of the parameters: no slower, 0.875 instead of 1.75 nats a token "
        "lost, 0.4 kB instead of 0.4 kB of targeted weights.",
    )
    faster = frontier(problem(LOSSES, [ns // 2 for ns in SLOPE]), points=7)
    (larger,) = verdicts(Sources(decided(), frontier=faster))
    assert larger.startswith("The frontier has a better choice where memory does not decide, at 0.8611 of the param")
    assert verdicts(Sources(decided(), frontier=whole_range())) == ()
    assert verdicts(Sources(with_recipe(decided(), shots=2), frontier=halved)) == ()


def test_perplexity_ends_at_three_times_the_dense_one() -> None:
    by_param, _ = charts(Sources(decided(), "ours", {"theirs": by_rule()}, whole_range()))
    assert by_param["cut"] == "cut at 3x dense: 5 points, A, P above"
    assert [mark.y for mark in by_param["marks"][1:]] == [min(mark.y for mark in by_param["marks"])] * 2
    assert "perplexity 42.52" in by_param["marks"][-1].words
    assert charts(Sources(decided(1.0)))[0]["cut"] == ""


def test_what_the_table_lacks_is_said() -> None:
    page = page_of(decided(), profile=profile([]))
    assert "the latency table holds no time of 4 or of the next dims" in cells(page)[0]["reasons"][-1]
    assert "driver 580.1, CUDA 13.0" in words(page)
    said = words(page_of(decided(workloads=["decode:4@8"])))
    assert "decode:4@8: unknown, the profile lacks the shapes of 2 weights with 4 rows of input, " in said
    said = words(page_of(rounded()))
    assert "prefill:1x8: unknown, the profile has no w4a16; " in said


def test_bytes_bits_and_schemes_are_said() -> None:
    plan = rounded(0.44)
    (used, total), (model, dense), (bits, of_model) = plan.bytes, plan.model_bytes, plan.bits
    assert (used, total, model, dense) == (252, 576, 20_000 - 576 + 252, 20_000)
    assert (bits, of_model) == (8 * 252 / 288, 8 * model / 10_000)
    said = words(page_of(plan))
    assert "Targeted weights 0.3 kB 0.6 kB dense; 7.00 bits each" in said
    assert "Whole model 1.968e-05 GB 2e-05 GB dense; 15.74 bits each" in said
    assert "Memory 252 of 576 bytes: 0.4375 kept, 253 allowed; 19,676 of 20,000 bytes of the whole model" in said
    assert "7.00 bits per dense parameter, 15.74 in the whole model; 2 w4a16" in said
    assert "Price of a million bytes" in said
    cell = cells(page_of(plan))[0]
    facts = dict(cell["facts"])
    assert facts["Becomes"] == "dense\N{NO-BREAK SPACE}w4a16"
    assert facts["Bytes"] == "128 of 288 (7.11 bits a dense parameter)"
    assert cell["label"] == "layer 0, site0: dense\N{NO-BREAK SPACE}w4a16, 44% kept"
    title = f"{used / total:.3f} of its targeted bytes, {bits:.2f} bits a weight"
    assert f" to {title}: a GAC plan</title>" in page_of(plan)
    assert f", compressed to {title}\n" in model_card(plan)


def test_what_does_not_belong_together_is_refused_and_the_page_that_was_there_stays(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="plan a by svd beside a frontier by kfac; expected losses of one scale"):
        Sources(with_recipe(decided(), method="svd"), "a", frontier=whole_range())
    page = tmp_path / "page.html"
    page.write_text("before")
    with pytest.raises(PlanError, match=r"expected plans for the same model\."):
        gac.report(decided(), page, against={"theirs": with_measured(decided(), digest="3" * 64)})
    assert page.read_text() == "before"


def test_smaller_and_larger_are_weighed_at_the_plans_prices() -> None:
    plan = decided()
    (price,) = plan.certificate.multipliers
    smaller, larger = trades(plan, plan.sites[0])
    assert (smaller.choice, smaller.freed, smaller.lost) == ("low_rank\N{NO-BREAK SPACE}3", 24, 1.0)
    assert (larger.freed, larger.lost) == (-24, -0.5)
    assert smaller.worth == pytest.approx(24 * price)
    assert reasons(plan, plan.sites[0]) == (
        f"Why not smaller: low_rank\N{NO-BREAK SPACE}3 would free 24 parameters and lose 1 nats a token more. "
        f"Spent elsewhere, that is worth {nats(24 * price)}: less than it loses.",
        "Why not larger: low_rank\N{NO-BREAK SPACE}5 would take 24 parameters more and lose 0.500 nats a token less. "
        f"Elsewhere, that is worth {nats(24 * price)}: no more than it wins, yet the limits leave no room for it. "
        "The limit has 0 left.",
    )


def test_bytes_and_time_count_where_they_are_limited() -> None:
    plan = rounded(0.44)  # of 576 bytes
    assert [partial.weights[0].becomes for partial in plan.sites] == [("dense", 12, "w4a16"), ("low_rank", 4, "w4a16")]
    smaller, larger = trades(plan, plan.sites[1])
    assert (smaller.choice, smaller.freed) == ("low_rank\N{NO-BREAK SPACE}1", 124 - 48)
    assert (larger.choice, larger.freed) == ("dense\N{NO-BREAK SPACE}w4a16", 124 - 128)
    assert smaller.worth == pytest.approx(76 * plan.prices[1])
    for_less, for_more = reasons(plan, plan.sites[1])
    assert "would free 76 bytes and lose" in for_less
    assert for_more.endswith(f" The limit has {253 - 128 - 124} left.")
    plan = decided(1.0, latency={PREFILL: 0.5})
    smaller, larger = trades(plan, plan.sites[0])
    assert smaller.slower == ((PREFILL, -10),)
    assert smaller.worth == pytest.approx(10 * plan.certificate.multipliers[1])
    assert "would free 24 parameters, 10 ns faster at prefill:1x8 and lose" in reasons(plan, plan.sites[0])[0]
    assert larger.slower[0][1] > 0


def test_the_cache_counts_where_it_is_limited() -> None:
    weight = Weight("k_proj", 12, 12, heads=4, cached=True)
    dense, other = WeightChoice(weight, "dense", 12), Candidate(("latent",), ("bf16",), (4,), 96, 0.5, (), ())
    site = SiteChoice("k_proj", 0, "k_proj", (dense,), 144, 144, 0.0, (), alternatives=(other,))
    plan = decided(1.0, ())
    limited = replace(
        plan,
        sites=(site,),
        recipe=changed_recipe(plan.recipe, kv_cache=1.0),
        limits=(Limit("params", 1.0, 144, 144, 144), Limit("kv_numbers", 1.0, 12, 12, 12)),
        certificate=replace(plan.certificate, multipliers=(0.0, 0.01)),
    )
    (trade,) = trades(limited, site)
    assert ([saved for _, saved in trade.cached], trade.worth) == ([8], pytest.approx(0.08))
    assert reasons(limited, site)[0] == (
        "Why not smaller: latent\N{NO-BREAK SPACE}4 would free 48 parameters, 8 numbers a token less in the "
        "KV cache and lose 0.500 nats a token more. Spent elsewhere, that is worth 0.0800: less than it loses."
    )


def test_where_no_limit_binds_or_nothing_was_weighed() -> None:
    plan = decided(1.0)
    smaller, largest = reasons(plan, plan.sites[0])
    assert smaller.endswith("No limit binds, so nothing would be won with what is freed.")
    assert largest == "Dense is the largest there is."
    assert "Elsewhere, that is worth 0: " in reasons(rounded(0.5), rounded(0.5).sites[0])[-1]
    plan, by = decided(), by_rule()
    assert reasons(by, by.sites[0]) == ("The rule uniform gave this; it weighs no other choice.",)
    bare = replace(plan, sites=tuple(replace(site, alternatives=()) for site in plan.sites))
    said = "The plan does not hold what its sites could have had instead; gac allocate writes that now."
    assert (reasons(bare, bare.sites[0]), about_dense(bare)) == ((said,), said)
    partial = replace(plan, sites=(bare.sites[0], plan.sites[1]))
    assert reasons(partial, partial.sites[0]) == ("None of the plan's forms gives this site another candidate.",)


def test_dense_weights_by_projection() -> None:
    plan = renamed(decided(1.0), "q_proj")
    ((projection, dense, layers, nearest, _, lost, _),) = stayed_dense(plan).rows
    assert (projection, dense, layers) == ("q_proj", "2 of 2", "0-1")
    assert (nearest, lost) == ("low_rank\N{NO-BREAK SPACE}5 in layer 1", "0.375")
    assert about_dense(plan).startswith("A site stays dense where each smaller candidate loses more than the param")


# --- on the GPU -----------------------------------------------------------------------------------------------------

UNEVEN = profile([measured("low_rank", 90 if r % 8 else 30 + r // 8, m=8, k=64, r=r, n=64) for r in range(1, 65)])


IN_W8A8 = [replace(measured("low_rank", 24 + r // 16, m=8, k=64, r=r, n=64), dtype="w8a8") for r in range(16, 65, 16)]
WITH_W8A8 = profile([*UNEVEN.measurements, *IN_W8A8])
LINEAR = profile([measured("linear", 30, m=8, k=64, n=64)])


@pytest.mark.parametrize(
    ("table", "dim", "scheme", "said"),
    [
        (UNEVEN, 8, "bf16", "takes 31 ns; the next dim, 9, 90 ns (2.90x, no multiple of 8); .* one, 16, 32 ns."),
        (LINEAR, 8, "bf16", "or of the next dims."),
        (WITH_W8A8, 16, "w8a8", "takes 25 ns; the next dim, 17, an unknown time (.*); .* sound one, 32, 26 ns."),
    ],
)
def test_the_next_dim_on_the_gpu(table: Profile, dim: int, scheme: str, said: str) -> None:
    plan, weight = with_recipe(decided(), align=True), Weight("w", 64, 64)
    choice = WeightChoice(weight, "low_rank", dim, scheme)
    (sentence,) = next_dims(plan, table, choice, shared=False)
    pattern = re.escape(said).replace(r"\.\*", ".*")
    assert re.fullmatch(f"On the GPU, prefill:1x8: .*{dim} {pattern}", sentence)
    assert next_dims(plan, table, WeightChoice(weight, "dense", 64), shared=False) == ()
    unknown = "What the next dim takes is not told: "
    assert next_dims(plan, None, choice, shared=False) == (f"{unknown}the profile is not at hand.",)
    assert next_dims(plan, table, choice, shared=True) == (f"{unknown}weights of this site share a GEMM.",)


def test_numbers_in_words() -> None:
    assert [duration(ns) for ns in (None, 12, 30_400, 1_166_072)] == ["unknown", "12 ns", "30.4 µs", "1.166 ms"]
    assert [nats(loss) for loss in (0.0, 0.0000517, 0.25, 2.5, 1e-9)] == ["0", "0.0000517", "0.250", "2.5", "1e-09"]
    assert ranges([0, 1, 2, 4, 7, 8]) == "0-2, 4, 7-8"


@pytest.fixture(scope="module")
def skipping() -> Plan:
    """A plan that skips blocks and drops heads."""
    limits = {"prefill:1x1024": 0.55, "decode:1@1024": 0.75}
    workloads = [*map(Workload.parse, limits)]
    planner = planner_of_shapes("smollm2", workloads, "nvidia-h100-80gb-hbm3", layers=20)
    forms = ("narrow", "heads", "skip")
    return planner.plan(1.0, forms=forms, latency=limits, fuse="auto", slack=None)


def test_skipped_blocks_and_heads_on_the_page_and_in_the_figure(skipping: Plan, tmp_path: Path) -> None:
    assert {"heads", "skip", "narrow"} <= {weight.form for weight in skipping.weights}
    gac.report(skipping, tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "s: 0: an attention or MLP that is skipped" in page
    assert ">s 0<" in page.replace("\n", "")
    ax = gac.plots.plan(skipping)
    assert skipping.aligned_fraction == 1.0
    assert "*" not in {text.get_text()[-1:] for text in ax.texts}
    label = ax.xaxis.label
    assert label.get_text() == fill(f"projection ({legend_of(skipping)})", 16 * 7)
    figure: Any = label.get_figure()
    figure.canvas.draw()
    box = label.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1


def evaluated(plan: Plan, **changed: Any) -> dict[str, Any]:
    """The document of ``gac eval --against --json`` for a model of this plan."""

    def on(text: str, value: float) -> dict[str, Any]:
        return {"perplexity": {"text": text, "value": value}}

    small = {"plan": json.loads(to_json(plan)), **on("wiki", 12.0), "also": [on("news", 30.0)]}
    dense = {**on("wiki", 10.0), "also": [on("news", 20.0)]}
    return {"models": [{"plan": {}, **on("wiki", 1.0)}, small], "against": dense} | changed


def test_losses_by_text_stand_beside_what_was_measured(tmp_path: Path) -> None:
    parts = CalibrationPart("wiki", 3, 2.0), CalibrationPart("self", 1, 3.0)
    by_text = TextPrediction("wiki", 0.25, 9.0, 11.6), TextPrediction("self", 0.5, 20.0, 33.0)
    plan = decided()
    calibration = replace(plan.measured.calibration, text="wiki (3) and self (1)", parts=parts)
    plan = with_measured(plan, calibration=calibration)
    assert 'href="#texts"' not in page_of(plan)
    plan = replace(plan, prediction=replace(plan.prediction, by_text=by_text))
    assert "wiki 9.00 +0.2500" in words(page_of(plan))
    assert "give the file to gac report --measured" in words(page_of(plan))
    plan.save(tmp_path / "plan.json")
    (tmp_path / "eval.json").write_text(json.dumps(evaluated(plan)), encoding="utf-8")
    page = gac.report(tmp_path / "plan.json", tmp_path / "page.html", measured=tmp_path / "eval.json")
    read = words(page.read_text("utf-8"))
    for row in ("wiki 10.00 +0.2500 +0.1823 12.00 1.200", "news 20.00 +0.4055 30.00 1.500", "self 20.00 +0.5000"):
        assert row in read
    assert "geometric mean +0.2939 1.342" in read
    assert "Measured perplexity 1.342x of dense; 2 texts; 5.755x predicted Whole model" in read


def test_losses_of_a_healed_model_stand_beside_predictions_for_the_model_before(tmp_path: Path) -> None:
    plan = decided()
    plan = with_measured(plan, calibration=replace(plan.measured.calibration, text="wiki"))
    document = evaluated(plan)
    document["models"][1]["plan"]["healed"] = [{"tokens": 1}]
    (tmp_path / "eval.json").write_text(json.dumps(document), encoding="utf-8")
    texts = read_measured(tmp_path / "eval.json", plan)
    said = words(page_of(plan, measured=texts))
    assert "text dense predicted loss before healing loss perplexity ratio" in said
    assert "The model was healed after it was compressed, which predictions do not count." in said
    assert "of dense; 2 texts; 5.755x predicted before healing" in said


def test_one_text_is_measured_beside_the_prediction_of_the_plan(tmp_path: Path) -> None:
    plan = decided()
    plan = with_measured(plan, calibration=replace(plan.measured.calibration, text="wiki"))
    (tmp_path / "eval.json").write_text(json.dumps(evaluated(plan)), encoding="utf-8")
    texts = read_measured(tmp_path / "eval.json", plan)
    assert f"wiki 10.00 +{plan.prediction.loss:.4f} +0.1823" in words(page_of(plan, measured=texts))


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (None, "which cannot be used: FileNotFoundError"),
        ("[", "which cannot be used: JSONDecodeError"),
        ([], "which cannot be used: TypeError"),
        ({"against": None}, "which cannot be used: TypeError"),
        ({"models": []}, "of models with other plans"),
    ],
)
def test_what_was_not_measured_of_the_plan_is_refused(document: Any, problem: str, tmp_path: Path) -> None:
    plan, path = decided(), tmp_path / "eval.json"
    if document is not None:
        text = document if isinstance(document, str) else json.dumps(document or [])
        if isinstance(document, dict):
            text = json.dumps(evaluated(plan, **document))
        path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match=problem):
        read_measured(path, plan)
