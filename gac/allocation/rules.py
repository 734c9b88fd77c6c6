"""Ways to choose, by name: the exact choice over the loss curves, and the rules it is compared with."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from types import MappingProxyType
from typing import Literal

import numpy as np

from gac.allocation.assemble import Provenance, assemble
from gac.allocation.candidates import CandidateSet, Limited, candidate_at, step_of
from gac.allocation.knapsack import Solution
from gac.allocation.latencies import Timing
from gac.allocation.limits import budget_limit, cache_limit
from gac.allocation.problem import Decision, Instance, Problem, decide, pose
from gac.arrays import Ints
from gac.baselines.importance import most_important
from gac.baselines.ranks import (
    ROUNDINGS,
    Allotted,
    Rounding,
    allot,
    fisher_ranks,
    fisher_score,
    sensitivity_ranks,
    uniform_ranks,
)
from gac.baselines.zero_sum import zero_sum_ranks
from gac.curves import LossCurve
from gac.errors import GacError, did_you_mean
from gac.forms import Form, form_named
from gac.models.sites import Site
from gac.models.weights import Weight
from gac.plan import Certificate

_ROUNDED = ("uniform", "fisher", "zero-sum", "sensitivity")
RULES = ("loss", "importance", *_ROUNDED)
_OF_GROUPS = ("uniform", "fisher")
_COMMON_STEPS = (8, 16, 32, 64)
_PATTERN = re.compile(rf"([\w-]+)(?::({'|'.join(ROUNDINGS)})([1-9][0-9]{{0,8}}))?")


@dataclass(frozen=True)
class Rule:
    """How the choice is made; ``str(rule)`` is what ``parse`` reads.

    Attributes:
        name: ``loss`` (exact over the loss curves), ``importance``, or a peer's: ``uniform`` (SVD-LLM), ``fisher``
            (PaLU), ``zero-sum`` (ZS-SVD), ``sensitivity`` (ASVD).
        rounding: of the ranks that a peer's rule gives; None leaves them as they fall.
    """

    name: str
    rounding: Rounding | None = None

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """Read ``loss``, ``uniform``, ``uniform:down8``, ``fisher:nearest32``, ``uniform:pad64``, ...

        Raises:
            GacError: there is no such rule; names the nearest.
        """
        match = _PATTERN.fullmatch(text)
        if match is None or match[1] not in RULES or (match[2] and match[1] not in _ROUNDED):
            rounded = [f"{name}:{way}{step}" for name in _ROUNDED for way in ROUNDINGS for step in _COMMON_STEPS]
            raise GacError(
                f"rule {text!r} is unknown",
                f"one of {', '.join(RULES)}; the last four also rounded ({', '.join(ROUNDINGS)}), as in uniform:down8",
                did_you_mean(text, [*RULES, *rounded], "Correct the name."),
            )
        return cls(match[1], Rounding(match[2], int(match[3])) if match[2] else None)

    def check(self, forms: Sequence[str], latency: object, kv_cache: object = None) -> None:
        """Refuse what the rule knows nothing of.

        Raises:
            GacError: a rule other than ``loss`` without a form that it gives, or with another limit than the one that
                this form counts.
        """
        if self.name == "loss":
            return
        if (form := given_form(forms)) is None:
            raise GacError(
                f"rule {self} with forms {', '.join(forms) or 'none'}",
                "low_rank among the forms, the only one the rule gives",
                "Add the form low_rank, or use the rule loss.",
            )
        if form.counts == "cached":
            self._check_of_groups(forms)
        for name, limit in (("latency", latency), ("KV-cache", None if form.counts == "cached" else kv_cache)):
            if limit not in (None, {}):
                raise GacError(
                    f"rule {self} with a {name} limit",
                    "a budget alone, which is all that the rule knows",
                    f"Drop the {name} limit, or use the rule loss.",
                )

    def _check_of_groups(self, forms: Sequence[str]) -> None:
        if self.name not in _OF_GROUPS:
            raise GacError(
                f"rule {self} with form {', '.join(forms)}",
                f"one of {', '.join(('loss', *_OF_GROUPS))}, which know groups of heads",
                "Use one of these rules, or another method.",
            )
        if len(forms) > 1:
            raise GacError(
                f"rule {self} with forms {', '.join(forms)}",
                "one form of groups of heads, which is all that the rule gives",
                "Use the rule loss, or the method palu.",
            )

    def __str__(self) -> str:
        return f"{self.name}:{self.rounding}" if self.rounding else self.name


def given_form(forms: Sequence[str]) -> Form | None:
    """The first of these forms that a peer's rule gives."""
    return next((form for form in map(form_named, forms) if form.counts), None)


def decide_by(
    rule: Rule,
    problem: Problem,
    budget: float,
    latency: Mapping[str, float],
    made_from: Provenance,
    kv_cache: float | None = None,
) -> Decision:
    """The plan that a rule makes, set beside the exact choice.

    The certificate of a rule's plan holds what the plan loses, and as its bound what the exact choice loses with as
    many parameters as are allowed, or as the rule used where it took more. That choice is over the problem's
    candidates together with the rule's own, so the gap is what the rule gives away. The plan's ``align`` is that of
    the rule: those of the peers know no sound dims.

    A plan padded with zeros has the loss of the ranks before; ``compress`` fills the padding with further directions
    instead of zeros, and so loses no more.

    Args:
        latency: limits for the rule ``loss``, as in ``decide``; empty for any other.
        kv_cache: likewise, and for rules that give a form which counts the cache; None for any other.

    Raises:
        BudgetError: the budget cannot be met, or is no number.
    """
    if rule.name == "loss":
        return decide(problem, budget, latency, made_from, kv_cache)
    form = given_form(problem.forms)
    assert form is not None, "Rule.check refuses forms that no rule gives"
    assert (latency, kv_cache is None) == ({}, form.counts == "params"), "Rule.check refuses other limits"
    limit = budget_limit(budget, problem.params)
    cached = None if kv_cache is None else cache_limit(kv_cache, sum(int(rows.cached[0]) for rows in problem.dense))
    shared, fraction = (limit, budget) if kv_cache is None or cached is None else (cached, kv_cache)
    allotted = _allotted(rule, problem, form, fraction, shared)
    chosen = [_row(site, allotted, _curves(problem, form), problem.timing) for site in problem.sites]
    instance = _bounding(problem, chosen, limit, cached)
    solution = instance.solve()
    plan = assemble(
        problem.sites,
        chosen,
        problem.dense,
        budget,
        limit,
        problem.workloads,
        {},
        _certificate(rule, chosen, solution),
        made_from if rule.name == "importance" else replace(made_from, align=False),
        kv_cache,
    )
    return Decision(plan, instance, solution)


def _bounding(problem: Problem, chosen: Sequence[CandidateSet], limit: int, cached: int | None) -> Instance:
    """The exact choice with as much as is allowed, or as the rule used where it took more."""
    sets = problem.by_params if cached is None else problem.candidates(Limited(params=True, cached=True))
    used, kept = (sum(int(getattr(rows, what)[0]) for rows in chosen) for what in ("params", "cached"))
    all_of = [_with(*pair) for pair in zip(sets, chosen, strict=True)]
    return pose(all_of, max(limit, used), {}, None if cached is None else max(cached, kept))


def _certificate(rule: Rule, chosen: Sequence[CandidateSet], solution: Solution) -> Certificate:
    proof = solution.certificate
    value = fsum(float(rows.loss[0]) for rows in chosen)
    bound = min(proof.lower_bound, value)
    status: Literal["optimal", "feasible"] = "optimal" if value == bound else "feasible"
    return Certificate(status, value, bound, value - bound, proof.multipliers, str(rule))


def _allotted(rule: Rule, problem: Problem, form: Form, budget: float, limit: int) -> dict[str, Allotted]:
    """What the rule gives every weight, by name; budget and limit are of what the form counts."""
    weights = [weight for site in problem.sites for weight in site.weights]
    if rule.name == "importance":
        uniform = allot(weights, uniform_ranks(weights, budget, form), None, form)
        return most_important(weights, _scores(problem, weights, form), uniform, _sound_ranks(problem, form), limit)
    taking = [weight for weight in weights if form.takes(weight)]
    return allot(weights, _PEERS[rule.name](problem, taking, form, budget, limit), rule.rounding, form)


def _scores(problem: Problem, weights: Sequence[Weight], form: Form) -> dict[str, float]:
    curves = _curves(problem, form)
    return {weight.name: fisher_score(weight, curves[weight.name]) for weight in weights}


# The ranks that a peer's rule gives these weights of a problem in a form, for a budget and its limit.
_PEERS: Mapping[str, Callable[[Problem, Sequence[Weight], Form, float, int], dict[str, int]]] = MappingProxyType(
    {
        "uniform": lambda _, weights, form, budget, limit: uniform_ranks(weights, budget, form),
        "fisher": lambda problem, weights, form, budget, limit: fisher_ranks(
            weights, _scores(problem, weights, form), limit, form
        ),
        "zero-sum": lambda problem, weights, form, budget, limit: zero_sum_ranks(weights, problem.evidence, limit),
        "sensitivity": lambda problem, weights, form, budget, limit: sensitivity_ranks(
            weights, problem.evidence, limit
        ),
    }
)


def _curves(problem: Problem, form: Form) -> dict[str, LossCurve]:
    return {name: curve for one in problem.curves for name, curve in one.alone(form).items()}


def _sound_ranks(problem: Problem, form: Form) -> dict[str, Ints]:
    """The ranks of each weight that save parameters, and where dims are to be aligned are sound."""
    found = {}
    for site in problem.sites:
        for at, weight in enumerate(site.weights):
            step = step_of(form, problem.align)
            ranks = np.arange(step, form.largest_useful(weight) + 1, step, dtype=np.int64)
            sound = problem.timing.sound(form, weight, ranks, at in site.fused) if problem.align else slice(None)
            found[weight.name] = ranks[sound]
    return found


def _row(site: Site, allotted: Mapping[str, Allotted], curves: Mapping[str, LossCurve], timing: Timing) -> CandidateSet:
    """What was allotted to a site's weights, as its only candidate."""
    given = [allotted[weight.name] for weight in site.weights]
    lost = [
        0.0 if one.form == "dense" else float(curves[weight.name].loss[one.rank])
        for weight, one in zip(site.weights, given, strict=True)
    ]
    return candidate_at(site, [one.form for one in given], [one.dim for one in given], fsum(lost), timing)


def _with(rows: CandidateSet, own: CandidateSet) -> CandidateSet:
    """A site's candidates and the rule's own."""
    ours, theirs = vars(rows), vars(own)
    columns = {name: np.concatenate([ours[name], theirs[name]]) for name in ours if name != "site"}
    return CandidateSet(rows.site, **columns)
