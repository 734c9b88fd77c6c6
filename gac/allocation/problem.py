"""The decision as a knapsack: loss curves, a latency table and limits in exact integers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product

import numpy as np

from gac.allocation.candidate_set import CandidateSet
from gac.allocation.candidates import candidates
from gac.allocation.dense import DenseModel
from gac.allocation.knapsack import Group, Solution, knapsack
from gac.allocation.latencies import Timing
from gac.allocation.same_sizes import candidate_sets, in_model_order
from gac.core.arrays import Floats
from gac.core.errors import BudgetError, ModelError, ProfileError
from gac.forms import form_named, variants_of
from gac.forms.loss_curves import LossCurves
from gac.models.sites import Site
from gac.plan.costs import BYTES, COSTS, PARAMS
from gac.plan.engines import Step
from gac.plan.plan import Candidate, Measured
from gac.plan.recipe import Recipe
from gac.plan.summary import profile_command
from gac.profiling.table import Profile
from gac.schemes import DEFAULT_SCHEME, scheme_named

PATIENCE, CLOSE = 10.0, 1e-3
"""After this many units of work, accept a solution with a proved relative gap of at most 0.1 %.

The layers of some models are so much alike that a proof takes minutes. Predictions are off by far more than this.
"""
LOSS = "loss"
"""Name of the limit of loss where latency is minimised."""


def name_of(column: str) -> str:
    if column == LOSS:
        return "the loss limit"
    if column in COSTS:
        return f"the limit of {COSTS[column].unit}"
    return f"the latency limit in ns for {column.removeprefix('ns:')}"


@dataclass(frozen=True, eq=False)
class Problem:
    """The sites of a model (in its order), the loss of their dims, and the latencies of a GPU.

    ``measured`` is the evidence that plans state; ``measurements`` are the rule's, by weight name; ``steps`` are whole
    steps of the dense model in the engine, by workload.
    """

    sites: Sequence[Site]
    curves: LossCurves
    profile: Profile
    recipe: Recipe
    measured: Measured
    measurements: Mapping[str, Floats] = field(default_factory=dict)
    steps: Mapping[str, Step] = field(default_factory=dict)
    _candidates: dict[tuple[tuple[str, ...], tuple[str, ...]], list[CandidateSet]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def params(self) -> int:
        return sum(site.params for site in self.sites)

    @cached_property
    def may_outgrow(self) -> bool:
        """True if a candidate may have more parameters than the dense site, as latents of high rank have."""
        forms = [form_named(name) for name in self.recipe.space.forms]
        weights = (weight for site in self.sites for weight in site.weights)
        return any(form.can_exceed_dense(weight) for weight in weights for form in variants_of(forms, weight))

    @cached_property
    def dense(self) -> DenseModel:
        return DenseModel.of(self.sites, self.profile, self.recipe.deployment, self.steps)

    @property
    def timing(self) -> Timing:
        return self.dense.timing

    def loss_beyond_sum(self, chosen: Sequence[Candidate]) -> float:
        return self.curves.beyond_sum(
            (form, weight.name, dim)
            for site, candidate in zip(self.sites, chosen, strict=True)
            for weight, form, dim in zip(site.weights, candidate.forms, candidate.dims, strict=True)
        )

    def evidence(self, chosen: Iterable[Candidate]) -> Measured:
        """Return the evidence of plans of these candidates, with the error of modelled latencies if they have any.

        That is the largest median error of the workloads and of the schemes, of the GEMMs that have as many rows.
        """
        dense = (rows.candidate(0) for rows in self.dense.sets)
        modelled = [candidate for candidate in (*chosen, *dense) if any(candidate.modelled)]
        if not modelled:
            return self.measured
        dtypes = {scheme_named(name).dtype for candidate in modelled for name in candidate.schemes}
        kinds = product({workload.rows for workload in self.timing.workloads}, sorted(dtypes))
        errors = [error for kind in kinds if (error := self.profile.model.error(*kind)) is not None]
        return replace(self.measured, profile=replace(self.measured.profile, error=max(errors, default=None)))

    def candidates(self, limited: Collection[str], minimised: Collection[str] = ()) -> list[CandidateSet]:
        """Return the Pareto-optimal candidates of each choice for the given cost columns.

        They are built once for the same columns.

        Args:
            minimised: further cost columns, which may be unknown.

        Raises:
            ModelError: a loss is not finite; names the weight, form, scheme and dim.
        """
        columns, space = dict.fromkeys((*limited, *minimised)), self.recipe.space
        if space.schemes == (DEFAULT_SCHEME,):  # bytes are then proportional to parameters
            columns = dict.fromkeys(PARAMS if column == BYTES else column for column in columns)
        elif BYTES in columns and self.recipe.limits.budget == 1 and not self.may_outgrow:
            columns.pop(PARAMS, None)
        compared, needed = tuple(columns), tuple(column for column in columns if column in limited)
        if (compared, needed) in self._candidates:
            return self._candidates[compared, needed]
        for (form, scheme, weight), curve in self.curves.by_key.items():
            if len(wrong := np.flatnonzero(~np.isfinite(curve.loss))):
                raise ModelError(
                    f"{weight} in form {form} and scheme {scheme} loses {curve.loss[wrong[0]]} at dim {wrong[0]}",
                    "finite losses",
                    "Leave out the form or the scheme, or calibrate on other text; a scheme may be too narrow for the "
                    "weight's numbers.",
                )

        def build(site: Site, curves: LossCurves) -> CandidateSet:
            return candidates(site, curves, space, self.timing, compared, needed)

        sets = candidate_sets(self.sites, self.curves, space, build)
        self._candidates[compared, needed] = sets
        return sets


@dataclass(frozen=True, eq=False)
class Instance:
    """Candidates of known costs as a knapsack; limits by cost column, in the order of the groups' costs."""

    sets: tuple[CandidateSet, ...]
    groups: tuple[Group, ...]
    limits: Mapping[str, int]

    def solve(self, start: Sequence[int] | None = None) -> Solution:
        """Return the choice of the smallest value, with its proof; after ``PATIENCE`` of work, one ``CLOSE`` to it.

        Raises:
            BudgetError: the limits cannot be met; states what can be.
        """
        names = [name_of(column) for column in self.limits]
        solve = partial(knapsack, self.groups, list(self.limits.values()), names=names)
        with suppress(BudgetError):  # out of reach, or no choice was found with so little work
            solution = solve(work_limit=PATIENCE, start=start)
            if solution.certificate.gap <= CLOSE * solution.certificate.value:
                return solution
            start = solution.choice
        return solve(start=start)

    def chosen(self, solution: Solution) -> list[Candidate]:
        """Return the candidate of each site, in model order."""
        pairs = zip(self.sets, solution.choice, strict=True)
        return in_model_order(self.sets, (rows.of_sites(item) for rows, item in pairs))

    def alternatives(self, solution: Solution) -> list[tuple[Candidate, ...]]:
        """Return for each site the best candidates with fewer and with more parameters (or limited bytes) than its own.

        Best is the smallest Lagrangian value: the value plus all costs at the multipliers of the certificate.
        """
        alternatives, column = list[Sequence[tuple[Candidate, ...]]](), BYTES if BYTES in self.limits else PARAMS
        for rows, item, group in zip(self.sets, solution.choice, self.groups, strict=True):
            priced = group.values + group.costs @ np.array(solution.certificate.multipliers)
            size = rows.cost(column)
            sides = map(np.flatnonzero, (size < size[item], size > size[item]))
            best = [rows.of_sites(int(side[priced[side].argmin()])) for side in sides if len(side)]
            alternatives.append([*zip(*best, strict=True)] or [()] * len(rows.of_sites(item)))
        return in_model_order(self.sets, alternatives)


def as_knapsack(sets: Sequence[CandidateSet], limits: Mapping[str, int]) -> Instance:
    """Take the candidates whose limited costs are known; a ``ProfileError`` names a site that has none."""
    known_sets, groups = [], []
    for rows in sets:
        known = rows.known(limits)
        if not known.any():
            column = next((column for column in limits if not rows.known([column]).any()), next(iter(limits)))
            schemes, workload = ", ".join(np.unique(rows.schemes).tolist()), column.removeprefix("ns:")
            raise ProfileError(
                f"the profile lacks the latency of {rows.site} for {workload} in every form and scheme "
                f"that it may have (schemes {schemes})",
                "a form and scheme of known latency, since latency is limited",
                f"Measure this model's shapes with {profile_command('NAME', None, workload)} and the plan's --scheme, "
                "--engine and --tensor-parallel, or plan without a limit of latency: latency='any' (--latency any).",
            )
        known_sets.append(rows.pick(known))
        costs = np.column_stack([*map(known_sets[-1].cost, limits)])
        groups.append(Group(rows.site, known_sets[-1].loss, costs))
    return Instance(tuple(known_sets), tuple(groups), limits)
