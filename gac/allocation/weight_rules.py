"""Rules that choose for every weight separately; their plans state the exact choice of the same size as a bound."""

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import fsum
from typing import ClassVar, Literal, Self

from gac.allocation.candidate_set import CandidateSet
from gac.allocation.candidates import candidate_at
from gac.allocation.decide import Decision, plan_of
from gac.allocation.dense import total
from gac.allocation.knapsack import Solution
from gac.allocation.latencies import Timing
from gac.allocation.problem import Problem, as_knapsack
from gac.allocation.rules import RULES, Rule
from gac.core.errors import GacError
from gac.forms import FORMS, Form, form_named
from gac.forms.loss_curves import LossCurve
from gac.models.sites import Site, Weight
from gac.plan.costs import COSTS, KV_NUMBERS, PARAMS
from gac.plan.plan import Certificate
from gac.plan.recipe import Recipe
from gac.schemes import DEFAULT_SCHEME


@dataclass(frozen=True)
class Rounding:
    """A way to bring a rank to a multiple of ``step``: ``nearest`` (a half goes up), ``down``, ``up`` or ``pad``.

    ``pad`` fills up with zeros: the dim of ``up`` with the loss of the rank itself. No rank goes below one step.
    """

    way: str
    step: int

    def dim(self, rank: int) -> int:
        added = {"nearest": self.step // 2, "down": 0}.get(self.way, self.step - 1)
        return max(1, (rank + added) // self.step) * self.step


_WAYS = ("nearest", "down", "up", "pad")
_ROUNDING = re.compile(rf"({'|'.join(_WAYS)})([1-9][0-9]{{0,8}})")


@dataclass(frozen=True)
class Chosen:
    """The choice of a rule for a weight: form, stored dim, and the rank whose loss it has (below ``dim`` if padded)."""

    form: str
    dim: int
    rank: int


class WeightRule(Rule):
    """A rule that gives every weight one form, and keeps to a budget alone.

    Its plan's certificate holds the loss of the plan, and as its bound that of the exact choice with as many
    parameters as are allowed, or as the rule used where it took more. That choice is over the problem's candidates
    and the rule's, so the gap is what the rule costs.

    A plan padded with zeros has the loss of the ranks before; ``compress`` fills the padding with further directions
    instead of zeros, and so loses no more.

    Attributes:
        aligned: true if it keeps to dims that the profile shows to be sound, where the problem asks for those.
    """

    aligned: ClassVar[bool] = False

    @abstractmethod
    def choose(self, problem: Problem, form: Form, fraction: float, limit: int) -> Mapping[str, Chosen]:
        """Return the choice of every weight of the problem, by name.

        Args:
            form: the form of the weights that do not stay dense.
            fraction: kept fraction of the form's resource, its parameters or its numbers in the KV cache.
            limit: the same fraction of all weights together, rounded down.
        """

    def check(self, recipe: Recipe) -> None:
        for stated, expected, remedy in self._refusals(recipe):
            raise GacError(f"rule {self.name} with {stated}", expected, f"{remedy}, or use the rule loss.")

    def _refusals(self, recipe: Recipe) -> Iterator[tuple[str, str, str]]:
        space, form = recipe.space, _resource_form(recipe.space.forms)
        listed, cached = ", ".join(space.forms) or "none", form is not None and form.rule_resource == "cached"
        if form is None:
            known = [other.name for other in FORMS if other.rule_resource]
            yield f"forms {listed}", f"one of {', '.join(known)} among the forms", f"Add the form {known[0]}"
        if cached and not self.limits_cache:
            known = [other.name for other in RULES if other.limits_cache]
            expected = f"one of {', '.join(known)}, which support groups of heads"
            yield f"form {listed}", expected, "Use one of these rules, or another method"
        if cached and len(space.forms) > 1:
            yield f"forms {listed}", "one form of groups of heads, which is all that the rule gives", "Name one form"
        if space.schemes != (DEFAULT_SCHEME,):
            yield f"schemes {', '.join(space.schemes)}", f"{DEFAULT_SCHEME} alone", "Leave them out"
        kept = (PARAMS, KV_NUMBERS) if cached else (PARAMS,)
        for name in ("latency", *(cost.limit for cost in COSTS.values() if cost.name not in kept)):
            if getattr(recipe.limits, name):
                yield f"a limit of {name}", "a budget alone, the only limit of the rule", f"Drop the limit {name}"
        if space.same_count:
            yield "same_count", "routed experts as they are, which the rule gives no choice", "Leave it out"
        if recipe.slack:
            yield f"slack {recipe.slack:g}", "no slack, which needs latencies", "Leave it out"

    def decide(self, problem: Problem) -> Decision:
        recipe = problem.recipe
        form = _resource_form(recipe.space.forms)
        assert form is not None, "check refuses forms that no rule gives"
        limits = problem.dense.allowed(problem.recipe)
        column = KV_NUMBERS if form.rule_resource == "cached" else PARAMS
        choices, curves = self.choose(problem, form, recipe.fractions[column], limits[column]), curves_of(problem, form)
        sets = [_row(site, choices, curves, problem.timing) for site in problem.sites]
        most = {column: max(limit, total(sets, column) or 0) for column, limit in limits.items()}
        both = [CandidateSet.concatenate(pair) for pair in zip(problem.candidates(limits), sets, strict=True)]
        instance = as_knapsack(both, most)
        solution = instance.solve()
        plan = plan_of(problem, [rows.candidate(0) for rows in sets], _certificate(self.name, sets, solution))
        if not self.aligned:
            plan = replace(plan, recipe=replace(recipe, space=replace(recipe.space, align=False)))
        return Decision(plan, instance, solution)


class RankRule(WeightRule):
    """A rule that gives ranks, which can be rounded: ``NAME:down8``, ``NAME:nearest32``, ``NAME:pad64``.

    Attributes:
        rounding: of the ranks; None leaves them as they are.
    """

    rounding: Rounding | None = None

    @abstractmethod
    def ranks(
        self, problem: Problem, weights: Sequence[Weight], form: Form, fraction: float, limit: int
    ) -> Mapping[str, int]:
        """Return ranks by weight name; a weight without one, or that its form makes no smaller, stays dense.

        Args:
            weights: those that can have the form.
            form, fraction, limit: as for ``choose``.
        """

    def with_parameter(self, text: str) -> Self:
        """Return the same rule with its ranks rounded.

        Raises:
            GacError: the text is no rounding.
        """
        match = _ROUNDING.fullmatch(text)
        if match is None:
            expected = f"a way to round ({', '.join(_WAYS)}) and a number"
            raise GacError(f"rule {self.name}:{text}", expected, f"Write it like {self.name}:down8.")
        rounded = copy(self)
        rounded.name, rounded.rounding = f"{self.name}:{text}", Rounding(match[1], int(match[2]))
        return rounded

    def choose(self, problem: Problem, form: Form, fraction: float, limit: int) -> Mapping[str, Chosen]:
        weights = weights_of(problem)
        taking = [weight for weight in weights if form.applies_to(weight)]
        return at_ranks(weights, self.ranks(problem, taking, form, fraction, limit), self.rounding, form)


def weights_of(problem: Problem) -> list[Weight]:
    return [weight for site in problem.sites for weight in site.weights]


def curves_of(problem: Problem, form: Form) -> dict[str, LossCurve]:
    return {weight.name: curve for weight in weights_of(problem) if (curve := problem.curves.of(form, weight))}


def at_ranks(
    weights: Sequence[Weight], ranks: Mapping[str, int], rounding: Rounding | None, form: Form
) -> dict[str, Chosen]:
    dense, padded = form_named("dense"), rounding is not None and rounding.way == "pad"
    chosen = {}
    for weight in weights:
        full, rank = dense.full(weight), max(1, ranks.get(weight.name, 1))
        dim = rounding.dim(rank) if rounding else rank
        smaller = weight.name in ranks and dim <= form.max_useful_dim(weight)
        choice = (form.name, dim, rank if padded else dim) if smaller else ("dense", full, full)
        chosen[weight.name] = Chosen(*choice)
    return chosen


def _resource_form(forms: Sequence[str]) -> Form | None:
    return next((form for form in map(form_named, forms) if form.rule_resource), None)


def _certificate(rule: str, chosen: Sequence[CandidateSet], solution: Solution) -> Certificate:
    proof = solution.certificate
    value = fsum(float(rows.loss[0]) for rows in chosen)
    bound = min(proof.lower_bound, value)
    status: Literal["optimal", "feasible"] = "optimal" if value == bound else "feasible"
    return Certificate(status, value, bound, value - bound, proof.multipliers, rule)


def _row(site: Site, choices: Mapping[str, Chosen], curves: Mapping[str, LossCurve], timing: Timing) -> CandidateSet:
    chosen = [(weight.name, choices[weight.name]) for weight in site.weights]
    losses = [0.0 if choice.form == "dense" else float(curves[name].loss[choice.rank]) for name, choice in chosen]
    forms, dims = [choice.form for _, choice in chosen], [choice.dim for _, choice in chosen]
    return candidate_at(site, forms, dims, fsum(losses), timing)
