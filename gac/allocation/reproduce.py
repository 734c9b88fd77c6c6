"""The command that makes a plan again."""

from collections.abc import Iterator
from shlex import join

from gac.allocation.rules import RULES
from gac.forms import form_named
from gac.plan import Plan


def allocate_command(plan: Plan, profile: str | None = None) -> str:
    """All that was asked for, and what was chosen where nothing was; two lines, its words quoted for a shell.

    Args:
        profile: the name of the latency table; None leaves it to be found.
    """
    first, second = join([plan.model, *_choice(plan)]), join([*_texts(plan, profile), "-o", "plan.json"])
    return f"gac allocate {first} \\\n  {second}"


def rule_of(plan: Plan) -> str | None:
    """The rule that made it: its plan is certified under the rule's name. None for the exact choice."""
    made_by = plan.certificate.method.partition(";")[0]  # what follows was added by a cross-check or a repair
    return made_by if made_by.partition(":")[0] in RULES.names else None


def _choice(plan: Plan) -> Iterator[str]:
    """Options that say what is chosen among, and how."""
    of_cache = any(form_named(form).counts == "cached" for form in plan.forms)  # then the budget is of the KV cache
    cache = plan.kv_cache.asked if plan.kv_cache else None
    budget = cache if of_cache and cache else plan.budget.asked
    yield from ("--budget", repr(budget), "--method", plan.method)
    for form in plan.forms:
        yield from ("--form", form)
    if plan.align is not True:
        yield from ("--align-to", str(plan.align)) if plan.align else ("--no-align",)
    for workload, fraction in plan.latency.items():
        yield from ("--latency", f"{workload}={fraction!r}")
    if cache is not None and not of_cache:
        yield from ("--kv-cache", repr(cache))
    if rule := rule_of(plan):
        yield from ("--rule", rule)
    yield from ("--refit", plan.refit)
    if plan.fused:
        yield "--fuse-where-faster" if plan.fused == "auto" else "--fuse"
    if plan.one_row:
        yield "--one-row"


def _texts(plan: Plan, profile: str | None) -> Iterator[str]:
    """Options that say what is measured."""
    text = plan.calibration
    for workload in plan.workloads:
        yield from ("--workload", workload.workload)
    if profile is not None:
        yield from ("--profile", profile)
    yield from ("--calibration", f"{text.text}:{text.windows}x{text.window_tokens}", "--seed", str(plan.seed))
    if plan.shots != 1:
        yield from ("--shots", str(plan.shots))
