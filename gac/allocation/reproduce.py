"""The command that makes a plan again."""

from shlex import quote

from gac.allocation.rules import RULES
from gac.forms import form_named
from gac.plan import Plan


def allocate_command(plan: Plan, profile: str | None = None) -> str:
    """All that was asked for, and what was chosen where nothing was; two lines.

    Args:
        profile: the name of the latency table; None leaves it to be found.
    """
    text = plan.calibration
    options = [f"--budget {_budget(plan)!r}", f"--method {plan.method}", *(f"--form {form}" for form in plan.forms)]
    options += [] if plan.align is True else [f"--align-to {plan.align}" if plan.align else "--no-align"]
    options += [f"--latency {workload}={fraction!r}" for workload, fraction in plan.latency.items()]
    options += [*_cache_limit(plan), *_rule(plan), f"--refit {plan.refit}", *_fusing(plan)]
    texts = [f"--workload {workload.workload}" for workload in plan.workloads]
    texts += [] if profile is None else [f"--profile {quote(profile)}"]
    texts += [f"--calibration {quote(f'{text.text}:{text.windows}x{text.window_tokens}')}", f"--seed {plan.seed}"]
    return f"gac allocate {quote(plan.model)} {' '.join(options)} \\\n  {' '.join(texts)} -o plan.json"


def rule_of(plan: Plan) -> str | None:
    """The rule that made it: its plan is certified under the rule's name. None for the exact choice."""
    made_by = plan.certificate.method
    return made_by if made_by.partition(":")[0] in RULES else None


def _limits_cache(plan: Plan) -> bool:
    """Whether the budget is the kept fraction of the KV cache, as for methods whose form counts that."""
    return any(form_named(form).counts == "cached" for form in plan.forms)


def _budget(plan: Plan) -> float:
    of_cache = _limits_cache(plan) and plan.kv_cache and plan.kv_cache.asked
    return of_cache or plan.budget.asked


def _cache_limit(plan: Plan) -> list[str]:
    asked = plan.kv_cache.asked if plan.kv_cache else None
    return [] if asked is None or _limits_cache(plan) else [f"--kv-cache {asked!r}"]


def _fusing(plan: Plan) -> list[str]:
    if not plan.fused:
        return []
    return ["--fuse-where-faster" if plan.fused == "auto" else "--fuse"]


def _rule(plan: Plan) -> list[str]:
    rule = rule_of(plan)
    return [] if rule is None else [f"--rule {rule}"]
