import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gac.allocation.crosscheck import verified
from gac.allocation.decide import decide
from gac.allocation.problem import Problem
from gac.allocation.rules import RULES
from gac.core.errors import GacError
from gac.models.sites import Site, Weight
from gac.plan.plan import Plan
from gac.plan.recipe import Recipe
from tests.allocation.small_problems import PREFILL, asking, problem

LOSSES = [[0.5, 0.4, 0.3, 0.2, 0.1], [1.5, 1.0, 0.6, 0.3, 0.1], [9.0, 5.0, 3.0, 2.0, 1.0]]
LATENCIES = [10, 11, 12, 13, 14, 20]
SMALL = problem(LOSSES, LATENCIES)


def plan(rule: str, budget: float = 0.7, of: Problem = SMALL) -> Plan:
    return RULES.get(rule).decide(asking(of, budget, rule=rule)).plan


def dims(decided: Plan) -> list[tuple[str, int]]:
    return [(weight.form, weight.dim) for weight in decided.weights]


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "dwn8", "down0", "down-8", "down1234567890"])
def test_what_is_no_rounding(text: str) -> None:
    with pytest.raises(GacError, match=rf"rule uniform:{text}; expected a way to round \(nearest, down, up, pad\)"):
        RULES.get(f"uniform:{text}")


def test_the_exact_choice_takes_any_form_and_limit() -> None:
    decided = RULES.get("loss").decide(asking(SMALL, 0.7, latency={PREFILL: 0.9})).plan
    assert decided.recipe.limits.latency == {PREFILL: 0.9}


@pytest.mark.parametrize(
    ("rule", "arguments", "message"),
    [
        ("uniform", {"forms": ["low_rank"], "latency": 0.9}, "with a limit of latency; expected a budget alone"),
        ("fisher", {"forms": ["narrow"]}, "with forms narrow; expected one of low_rank, latent among the forms. Add"),
        *(
            (rule, {"forms": ["latent:2"], "kv_cache": 0.5}, "with form latent:2; expected one of loss, uniform, f")
            for rule in ("zero-sum", "sensitivity:down8", "importance")
        ),
        (
            "fisher",
            {"forms": ["latent:1", "head_dim"], "kv_cache": 0.5},
            "with forms latent:1, head_dim; expected one form of groups of heads, which is all that the rule gives. ",
        ),
    ],
)
def test_what_a_rule_knows_nothing_of_is_refused(rule: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(GacError, match=f"^{re.escape(f'rule {rule} {message}')}"):
        RULES.get(rule).check(Recipe.of(**arguments))


# --- plans ----------------------------------------------------------------------------------------------------------


def test_uniform_gives_every_weight_the_same_rank() -> None:
    decided = plan("uniform")
    assert dims(decided) == [("low_rank", 4)] * 3
    assert decided.prediction.loss == pytest.approx(0.2 + 0.3 + 2.0)


def with_measured(*measured: object) -> Problem:
    return replace(SMALL, measurements={f"site{index}": np.array(values) for index, values in enumerate(measured)})


CHANGES = with_measured([1e-9] * 12, [1.0] * 12, [2.0] * 12)
TRUNCATED = with_measured(
    [[1, 4.0], [3, 2.9], [5, 2.5]], [[1, 3.0], [3, 2.8], [5, 2.5]], [[1, 9.0], [3, 8.0], [5, 3.1]]
)


@pytest.mark.parametrize(
    ("rule", "of", "ranks"),
    [
        ("fisher", SMALL, [1, 4]),  # more to what matters more
        ("zero-sum", CHANGES, [1, 5]),  # all components of the first but one go before those that predict more
        ("zero-sum:down2", CHANGES, [2, 4]),
        ("sensitivity", TRUNCATED, [3, 3]),  # one threshold for all
    ],
)
def test_peers_leave_the_last_weight_dense(rule: str, of: Problem, ranks: list[int]) -> None:
    assert dims(plan(rule, of=of)) == [*(("low_rank", rank) for rank in ranks), ("dense", 12)]


def test_the_certificate_is_the_gap_to_the_exact_choice() -> None:
    proof, exact = plan("uniform").certificate, plan("loss").certificate
    assert (proof.status, proof.method) == ("feasible", "uniform")
    assert proof.value == pytest.approx(2.5)
    assert proof.lower_bound == exact.value
    assert proof.gap == proof.value - proof.lower_bound


def test_a_rule_that_overshoots_says_by_how_much() -> None:
    budget = plan("uniform:up5").budget
    assert (budget.limit, budget.used, budget.over) == (302, 360, 58)


def test_what_overshoots_is_set_beside_the_exact_choice_of_as_many_parameters() -> None:
    proof = plan("uniform:up5").certificate
    assert proof.lower_bound == decide(asking(SMALL, 360 / 432)).plan.certificate.value


def test_padding_costs_the_padded_params_and_latency_and_keeps_the_loss() -> None:
    padded, plain, up = plan("uniform:pad5"), plan("uniform"), plan("uniform:up5")
    assert padded.prediction.loss == plain.prediction.loss
    assert padded.budget.used == up.budget.used
    assert [(w.plan_ns, w.dense_ns) for w in padded.workloads] == [(3 * 14, 60), (3 * 11, 30)]


def test_the_importance_rule_keeps_the_budget() -> None:
    decided = plan("importance")
    assert dims(decided) == [("low_rank", 2), ("low_rank", 5), ("low_rank", 5)]
    assert decided.budget.over == 0
    assert decided.certificate.gap > 0


def test_weights_that_run_together_are_timed_together() -> None:
    """Two pairs of 4 over one GEMM of width 8, which this profile lacks, unlike the pairs by themselves."""
    weights = tuple(Weight(f"site{index}", 12, 12, input_group="x") for index in range(2))
    site = Site("both", 0, "q_proj", weights, fused=(0, 1))
    both, either = (replace(SMALL, sites=(fused,)) for fused in (site, replace(site, fusion_optional=True)))
    assert [workload.plan_ns for workload in plan("uniform", of=both).workloads] == [None, None]
    assert None not in [workload.plan_ns for workload in plan("uniform", of=either).workloads]


def test_of_a_rule_the_bound_is_verified() -> None:
    decided = verified(RULES.get("uniform").decide(asking(SMALL, 0.7)))
    assert decided.certificate.method == (
        "uniform; of its bound HiGHS agrees: it proved that none is better by 2e-06 of the sum (limits within 1e-06)"
    )
