"""A plan on disk: read back equal, refused when it contradicts itself."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from gac.core.errors import PlanError
from gac.plan.plan import Candidate, Plan
from gac.plan.record import WorkloadLatency
from gac.plan.summary import allocate_command
from tests.changed import changed_recipe, edited, with_measured, with_recipe
from tests.compression.compressed import MakePlan

CHANGES = {"model.layers.0.self_attn.q_proj": ("low_rank", 24), "model.layers.0.self_attn.o_proj": ("low_rank", 9)}

NUMBERS = ("window_tokens", "held", "tokens", "learning_rate", "seed", "before", "after", "blocks")
UNTRAINED = {"texts": ["a"], "windows": 0} | dict.fromkeys(NUMBERS, 1)


@pytest.fixture
def plan(tiny_config: LlamaConfig, make_plan: MakePlan) -> Plan:
    return make_plan(tiny_config, CHANGES)


@pytest.fixture
def weighed(plan: Plan, tmp_path: Path) -> Path:
    """A plan whose first site, a q_proj of 64 x 64, could have had rank 16."""
    other = Candidate(("low_rank",), ("bf16",), (16,), 2048, 0.2, (), ())
    first, *rest = plan.sites
    path, weighing = tmp_path / "weighed.json", replace(plan, sites=(replace(first, alternatives=(other,)), *rest))
    weighing.save(path)
    assert Plan.load(path) == weighing
    return path


def test_plans_are_read_back_equal_and_those_of_earlier_versions_too(plan: Plan, tmp_path: Path) -> None:
    over = replace(plan, limits=(replace(plan.budget, limit=plan.budget.used - 5, over=5),))
    assert "allowed, overshot by 5;" in over.summary()
    for made in (plan, over):
        made.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == made
        assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    timed = WorkloadLatency("prefill:1x8", 12_000, 9_000, 14, 0, 0, fused_ns=7_000)
    sites = tuple(replace(site, latency_ns=(None,)) for site in plan.sites)
    recipe = changed_recipe(plan.recipe, workloads=["prefill:1x8"])
    older = replace(plan, recipe=recipe, workloads=(timed,), sites=sites)
    older.save(tmp_path / "plan.json")
    with edited(tmp_path / "plan.json") as document:
        del document["recipe"]["space"]["rotate"], document["measured"]["rotation"]
        del document["recipe"]["space"]["head"], document["measured"]["head"], document["prediction"]["head"]
    assert Plan.load(tmp_path / "plan.json") == older


def test_the_summary_names_budget_forms_alignment_and_proof(plan: Plan) -> None:
    assert plan.alignment == {"64": 0, "32": 0, "16": 0, "8": 1, "unaligned": 1}
    assert plan.aligned_fraction == 0.5
    text = plan.summary()
    assert "12 dense, 2 low_rank" in text
    assert "certificate  optimal: loss 0.1, bound 0.1, gap 0" in text
    assert f"{plan.budget.used:,} of {plan.budget.total:,} targeted" in text


TOO_FEW = " (from {} x 1024 tokens alone, so it may be far too low)"
SAID = [(64, None, ""), (4, 0.15, ", give or take 15 %"), (1, 0.25, TOO_FEW.format(1)), (3, None, TOO_FEW.format(3))]


@pytest.mark.parametrize(("windows", "error", "words"), SAID)
def test_what_is_said_of_the_error_depends_on_the_text(plan: Plan, windows: int, error: float, words: str) -> None:
    text = replace(plan.measured.calibration, windows=windows, window_tokens=1024)
    lines = with_measured(plan, calibration=text, error=error).summary().splitlines()
    assert f"loss         +{plan.prediction.loss:.4f} nats a token predicted{words}" in lines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(extra=1), "extra: Unexpected keyword argument"),
        (lambda d: d["prediction"].update(loss="NaN"), "prediction.loss: Input should be a valid number"),
        (lambda d: d["sites"][0]["weights"][0].update(dim=16), "states 3072 parameters; expected 2048, as its dims"),
        (lambda d: d["sites"][1]["weights"][0].update(dim=10**30), "dim"),
        (lambda d: d["limits"][0].update(used=1), "plan states 1 of 92160 params"),
        (lambda d: d["limits"][0].update(over=5), "5 over it; expected 88192 of 92160, 0 over the limit"),
        (lambda d: d["limits"][0].update(column="time"), "as its recipe says"),
        (lambda d: d.update(limits=[]), "plan has no limits"),
        (lambda d: d.update(sites=[]), "plan has no sites"),
        (lambda d: d.update(schema_version=1), "schema version 1"),
        (lambda d: d["sites"][0]["weights"][0].update(form="magic"), "form 'magic' is unknown"),
        (lambda d: alternative(d).update(dims=[17]), "states 2048 parameters; expected 2176, as its dims"),
        (lambda d: alternative(d).update(dims=[-16], params=-2048), "low_rank dim -16; expected a dim from 1 to 64"),
        (lambda d: alternative(d).update(forms=[]), "has 0 forms, 1 schemes, 1 dims and 0 latencies"),
        (lambda d: d["certificate"].update(multipliers=[]), "plan has certificate"),
        (lambda d: d["healed"].append(UNTRAINED), "plan has healed"),
    ],
)
def test_an_edited_plan_is_refused(weighed: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    with edited(weighed) as document:
        change(document)
    with pytest.raises(PlanError, match=message):
        Plan.load(weighed)


def alternative(document: dict[str, Any]) -> Any:
    return document["sites"][0]["alternatives"][0]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"expected a Plan as this version of GAC writes it"):
        Plan.load(path)
    with pytest.raises(PlanError, match=r"cannot be read: No such file or directory"):
        Plan.load(tmp_path / "none.json")


def test_a_path_that_cannot_be_written_leaves_nothing(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(PlanError, match=r"cannot be written"):
        plan.save(tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.fixture
def other(tiny_config: LlamaConfig, make_plan: MakePlan) -> Plan:
    return make_plan(tiny_config, {"model.layers.0.self_attn.q_proj": ("low_rank", 16)})


def test_plans_are_compared_weight_by_weight(plan: Plan, other: Plan) -> None:
    q_proj, o_proj = plan.compare(other).differences
    assert (q_proj.first.name, o_proj.first.name) == tuple(CHANGES)
    assert (q_proj.first.dim, q_proj.second.form, q_proj.second.dim, q_proj.params) == (24, "low_rank", 16, -1024)
    assert (o_proj.first.dim, o_proj.second.form, o_proj.second.dim) == (9, "dense", 64)
    assert o_proj.params == 4096 - 9 * 128
    assert plan.compare(plan).differences == ()
    assert plan.compare(other).same_prediction
    assert not plan.compare(with_recipe(other, method="svd")).same_prediction
    with pytest.raises(PlanError, match="expected plans for the same model"):
        plan.compare(with_measured(other, model="large", digest="f" * 64))


def test_the_command_has_what_is_no_default_and_what_a_plan_says_is_no_command(plan: Plan) -> None:
    asked = with_recipe(plan, fuse=True, rule="fisher:nearest32")
    assert " --refit none --rule fisher:nearest32 --fuse \\\n" in allocate_command(asked)
    asked = with_recipe(plan, method="kfac | reboot", rule="uniform:$(reboot)")
    hostile = with_measured(asked, model="tiny; reboot")
    words = shlex.split(allocate_command(hostile))
    told = [words[2], words[words.index("--method") + 1], words[words.index("--rule") + 1]]
    assert told == ["tiny; reboot", "kfac | reboot", "uniform:$(reboot)"]
    assert "'tiny; reboot'" in allocate_command(hostile)
