"""What a plan remembers of the candidates that were not chosen."""

import pytest

from gac.allocation.problem import decide
from gac.allocation.rules import RULES
from gac.plan import Plan
from tests.allocation.small_problems import asking, problem

LOSSES = [[8, 4, 2, 1, 0.5], [6, 3, 1.5, 0.75, 0.375]]
LATENCIES = [10, 20, 30, 40, 50, 60]


@pytest.fixture
def plan() -> Plan:
    """192 of 288 parameters: ranks of 24 parameters each."""
    return decide(asking(problem(LOSSES, LATENCIES), 0.667)).plan


def test_a_smaller_one_and_a_larger_one_than_dense_there_is_none(plan: Plan) -> None:
    assert [(site.weights[0].dim, site.params) for site in plan.sites] == [(4, 96), (4, 96)]
    for site in plan.sites:
        smaller, larger = site.alternatives
        assert smaller.params < site.params < larger.params
        assert smaller.loss > site.loss > larger.loss
    whole = decide(asking(problem(LOSSES, LATENCIES), 1.0)).plan
    assert all(one.params < site.params for site in whole.sites for (one,) in [site.alternatives])


def test_they_are_the_best_at_the_prices_of_the_certificate(plan: Plan) -> None:
    (price,) = plan.certificate.multipliers
    smaller = plan.sites[0].alternatives[0]
    priced = {rank: loss + price * 24 * rank for rank, loss in enumerate(LOSSES[0][:3], start=1)}
    assert smaller.dims == (min(priced, key=lambda rank: priced[rank]),)


def test_a_rule_weighs_none() -> None:
    plan = RULES.get("uniform").decide(asking(problem(LOSSES, LATENCIES), 0.5)).plan
    assert [site.alternatives for site in plan.sites] == [(), ()]
