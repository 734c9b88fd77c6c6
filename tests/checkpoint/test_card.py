"""The model card, and what a terminal shows: names are text, whatever is in them."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gac.checkpoint.card import export_card, model_card
from gac.core.errors import GacError
from gac.core.io import from_json, to_json
from gac.plan.evidence import Healed
from gac.plan.plan import Plan
from tests.changed import with_measured
from tests.cli.commands import run

PLAN = Plan.load(Path(__file__).parent.parent / "fuzz" / "corpus" / "plan" / "changed")
EVIL = "a/<script>alert(1)</script><img src=x onerror=e>`b`|[c](http://d)\x1b[31m\n---\ntitle: e\n```\n</pre>\n# f"


def cards(name: str) -> list[str]:
    plan = with_measured(PLAN, model=name)
    plan = with_measured(plan, profile=replace(plan.measured.profile, gpu=name))
    return [model_card(plan), export_card(plan, "merge")]


@pytest.mark.parametrize("number", [0, 1])
def test_a_name_is_text_in_the_card(number: int) -> None:
    card, plain = cards(EVIL)[number], cards("tiny")[number]
    for tag in ("<script", "<img", "\x1b"):
        assert tag not in card
    assert card.count("</pre>") == plain.count("</pre>")
    outside, of_plain = (re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL) for text in (card, plain))
    for markup in ("[c](", " `b`", ">`b`", "http://d"):
        assert markup not in outside
    assert outside.count("\n#") == of_plain.count("\n#")
    assert outside.count("\n---") == of_plain.count("\n---")
    front, rest = card.split("\n---\n", 1)
    assert front == plain.split("\n---\n", 1)[0]
    assert rest.splitlines()[1].startswith("# a/&lt;script&gt;alert(1)")


def test_plain_names_stay_and_names_of_files_cannot_move_the_cursor(saved: Path) -> None:
    card = cards("HuggingFaceTB/SmolLM2-135M")[0]
    assert "base_model: HuggingFaceTB/SmolLM2-135M\n" in card
    assert "\n# HuggingFaceTB/SmolLM2-135M, compressed to" in card
    assert "<pre>\nGAC plan for HuggingFaceTB/SmolLM2-135M (llama)" in card
    (saved / "\x1b[2J\u202ex").touch()
    shown = run("verify", saved).output
    assert "not checked  \\x1b[2J\\u202ex (not there when it was saved)" in shown
    assert "\x1b" not in shown


def test_a_plan_holds_no_time() -> None:
    numbers = {"windows": 1, "window_tokens": 2, "held": 1, "tokens": 5, "learning_rate": 0.1, "seed": 0}
    healed = Healed(texts=("a",), before=1.0, after=0.5, blocks=0.1, **numbers)
    written = to_json(healed)
    assert b"seconds" not in written
    earlier = written.replace(b'"seed"', b'"seconds":3.5,"seed"')
    assert from_json(Healed, earlier, "plan", GacError) == healed
