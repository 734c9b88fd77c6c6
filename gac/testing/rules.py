"""The contract of a rule."""

import math

import gac
from gac.allocation.rules import RULES, Rule
from gac.core.errors import GacError
from gac.forms import DEFAULT_FORMS, DENSE, FORMS
from gac.plan.plan import Plan
from gac.plan.recipe import Recipe
from gac.testing.models import temporary_home, tiny_model, tiny_text, tiny_tokenizer

_WORKLOAD = "prefill:1x1024"


def check_rule(rule: Rule) -> None:
    """Refuse a rule whose plans are not what it says, of a tiny random model.

    Every weight gets a form that was asked for, or stays dense; the plan is certified under the rule's name, loses no
    less than its bound, and is the same when asked again. A smaller budget takes no more parameters. Forms and limits
    that the rule knows nothing of are refused with a ``GacError``.

    Raises:
        AssertionError: says what does not hold, at which budget.
        GacError: the registry refuses the rule.
    """
    RULES.check(rule)
    _check_refusals(rule)
    with temporary_home():
        plans = {budget: _plan(rule, budget) for budget in (0.5, 0.8)}
        again = _plan(rule, 0.5)
    assert again == plans[0.5], f"{rule.name}: another plan when asked again"
    for budget, plan in plans.items():
        _check_plan(rule, plan, f"{rule.name} at budget {budget:g}")
    used = [plan.budget.used for plan in plans.values()]
    assert used == sorted(used), f"{rule.name}: a smaller budget takes more parameters: {used} at 0.5 and 0.8"


def _plan(rule: Rule, budget: float) -> Plan:
    return gac.allocate(
        tiny_model(),
        budget,
        rule=RULES.name(rule),
        method="svd",
        forms=DEFAULT_FORMS[:1],
        profile="nvidia-h100-80gb-hbm3",
        workloads=[_WORKLOAD],
        calibration=tiny_text(),
        tokenizer=tiny_tokenizer(),
        align=False,
        refit="none",
        progress=False,
    )


def _check_plan(rule: Rule, plan: Plan, of: str) -> None:
    proof, loss = plan.certificate, plan.prediction.summed
    forms = {weight.form for weight in plan.weights} - {DENSE.name, DEFAULT_FORMS[0]}
    assert not forms, f"{of}: gives {', '.join(sorted(forms))}, which was not asked for"
    assert proof.method == rule.name or rule.name == "loss", f"{of}: certified as {proof.method!r}"
    close = math.isclose(proof.value, loss, rel_tol=1e-9, abs_tol=1e-12)
    assert close, f"{of}: certified is a loss of {proof.value:.6g} nats a token, the choices lose {loss:.6g}"
    assert proof.lower_bound <= proof.value, f"{of}: loses less than its bound {proof.lower_bound:.6g}"
    over = max(0, plan.budget.used - plan.budget.limit)
    assert plan.budget.over == over, f"{of}: takes {over} parameters more than allowed, and says {plan.budget.over}"


def _check_refusals(rule: Rule) -> None:
    for recipe in (
        Recipe.of(forms=[]),
        Recipe.of(forms=DEFAULT_FORMS[:1], latency={_WORKLOAD: 0.9}),
        Recipe.of(forms=DEFAULT_FORMS[:1], memory=0.9),
        *(Recipe.of(forms=[name], kv_cache=cache) for name in FORMS.names for cache in (None, 0.5)),
    ):
        try:
            rule.check(recipe)
        except GacError:
            continue
        except Exception as failure:
            raise AssertionError(f"{rule.name}.check raises {failure!r} instead of a GacError") from failure
