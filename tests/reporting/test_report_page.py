"""The page as text: what it answers, what it escapes, what belongs together."""

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import gac
from gac.allocation.frontier import frontier
from gac.checkpoint.card import model_card
from gac.core.errors import PlanError
from gac.plan.plan import Plan
from gac.reporting.report.render import report_page
from gac.reporting.report.sources import Sources
from tests.allocation.small_problems import profile
from tests.changed import with_measured, with_recipe
from tests.reporting.report_plans import by_rule, decided, rounded, rounding, whole_range


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


def test_other_plans_stand_beside_it() -> None:
    page = page_of(decided(), name="ours", against={"theirs": by_rule()})
    assert ["In theirs", "low_rank\N{NO-BREAK SPACE}3"] in cells(page)[0]["facts"]
    headings = "Mark Plan Kept Over Loss Perplexity prefill:1x8 Aligned Weights Bits Model Of the model KV cache Proof"
    assert f"{headings} Weights that differ P ours 0.6667" in words(page)


def test_the_rule_says_how_far_it_is_from_the_best() -> None:
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


def test_what_the_table_lacks_is_said() -> None:
    page = page_of(decided(), profile=profile([]))
    assert "the latency table holds no time of 4 or of the next dims" in cells(page)[0]["reasons"][-1]
    assert "driver 580.1, CUDA 13.0" in words(page)
    said = words(page_of(decided(workloads=["decode:4@8"])))
    assert "decode:4@8: unknown, the profile lacks the shapes of 2 weights with 4 rows of input; " in said
    said = words(page_of(rounded()))
    assert "prefill:1x8: unknown, the profile has no w4a16; " in said


def test_bytes_bits_and_schemes_are_said() -> None:
    plan = rounded(0.44)
    (used, total), (model, dense), (bits, of_model) = plan.bytes, plan.model_bytes, plan.bits
    assert (used, total, model, dense) == (252, 576, 20_000 - 576 + 252, 20_000)
    assert (bits, of_model) == (8 * 252 / 288, 8 * model / 10_000)
    said = words(page_of(plan))
    assert "Targeted weights 0.3 kB 0.6 kB dense; 7.00 bits each" in said
    assert "Whole model 19.7 kB 20.0 kB dense; 15.74 bits each" in said
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
