"""What there is to decide: measured curves, a latency table and limits in exact integers, as a knapsack."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product

import numpy as np

from gac.allocation.candidate_set import CandidateSet
from gac.allocation.candidates import candidates, dense_candidate
from gac.allocation.knapsack import Group, Solution, knapsack
from gac.allocation.latencies import UNKNOWN, Timing
from gac.allocation.split_latencies import timing_of
from gac.core.arrays import Floats
from gac.core.errors import BudgetError, ModelError, ProfileError
from gac.core.workloads import Workload
from gac.forms import form_named, variants_of
from gac.forms.loss_curves import LossCurves
from gac.forms.planned_sites import fuse_sites
from gac.models.sites import Site
from gac.plan.costs import BYTES, KV_NUMBERS, PARAMS, floored, ns_of
from gac.plan.plan import Candidate, Measured
from gac.plan.recipe import Recipe
from gac.profiling.table import Profile
from gac.schemes import DEFAULT_SCHEME, scheme_named

PATIENCE, CLOSE = 10.0, 1e-3
"""Units of work after which a choice will do that is proved to be so close to the best, as a part of its value.

The layers of some models are so much alike that a proof takes minutes. What is predicted is off by far more than this.
"""
LOSS = "loss"
"""The limit of loss beside those of the cost columns, where something else is minimised."""


def total(sets: Sequence[CandidateSet], column: str) -> int | None:
    """What one candidate a site costs together; None where that is unknown.

    Args:
        sets: of each site one candidate.
    """
    costs = [int(rows.cost(column)[0]) for rows in sets]
    return None if UNKNOWN in costs else sum(costs)


def dense_total(dense: Sequence[CandidateSet], column: str) -> int:
    """What the dense sites cost, of which a limit is a fraction.

    Raises:
        ProfileError: that is a latency that the profile does not hold.
    """
    if (found := total(dense, column)) is None:
        site = next(rows.site for rows in dense if rows.cost(column)[0] == UNKNOWN)
        raise ProfileError(
            f"the profile lacks the latency of {site} for {column.removeprefix('ns:')}",
            "measured latencies, since latency is limited",
            "Profile this model's shapes with gac profile, or plan without a latency limit.",
        )
    return found


def allowed(recipe: Recipe, dense: Sequence[CandidateSet]) -> dict[str, int]:
    """What each limited cost column may sum up to.

    Raises:
        ProfileError: a latency is limited, and the profile lacks it.
    """
    return {column: floored(fraction, dense_total(dense, column)) for column, fraction in recipe.fractions.items()}


def name_of(column: str) -> str:
    """What an error calls the limit of a cost column."""
    known = {
        PARAMS: "the parameter limit",
        BYTES: "the memory limit in bytes",
        KV_NUMBERS: "the KV-cache limit in numbers a token",
        LOSS: "the loss limit",
    }
    return known.get(column) or f"the latency limit in ns for {column.removeprefix('ns:')}"


@dataclass(frozen=True, eq=False)
class Problem:
    """The sites of a model, what their dims lose, and what they take on a GPU.

    Attributes:
        sites: in model order.
        curves: of the model.
        profile: the latency table.
        recipe: what is asked for.
        measured: what plans say that they rest on.
        measurements: what the rule asked to be measured besides the curves, by weight name.
    """

    sites: Sequence[Site]
    curves: LossCurves
    profile: Profile
    recipe: Recipe
    measured: Measured
    measurements: Mapping[str, Floats] = field(default_factory=dict)
    _made: dict[tuple[tuple[str, ...], tuple[str, ...]], list[CandidateSet]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def params(self) -> int:
        """Parameters of the dense sites together."""
        return sum(site.params for site in self.sites)

    @cached_property
    def may_outgrow(self) -> bool:
        """Whether a candidate may have more parameters than the dense site: latents of high rank have."""
        forms = [form_named(name) for name in self.recipe.space.forms]
        weights = (weight for site in self.sites for weight in site.weights)
        return any(form.can_exceed_dense(weight) for weight in weights for form in variants_of(forms, weight))

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """What latency is looked up for."""
        return self.recipe.deployment.parsed

    @property
    def timing(self) -> Timing:
        """Where latencies come from, as for the candidates."""
        return timing_of(self.profile, self.recipe.deployment)

    @cached_property
    def dense(self) -> list[CandidateSet]:
        """Every site as it is."""
        timing = replace(self.timing, triton=False)
        return [dense_candidate(site, timing) for site in self.sites]

    @property
    def dense_ns(self) -> list[int | None]:
        """Latency of the dense sites, one a workload; None where unknown."""
        return self._summed_ns(self.dense)

    @property
    def fused_ns(self) -> list[int | None]:
        """The same where all weights that read the same input share their first GEMMs."""
        timing = replace(self.timing, triton=False)
        return self._summed_ns([dense_candidate(site, timing) for site in fuse_sites(self.sites)])

    def _summed_ns(self, sets: Sequence[CandidateSet]) -> list[int | None]:
        return [total(sets, ns_of(workload)) for workload in self.workloads]

    def together(self, chosen: Sequence[Candidate]) -> float:
        """What these candidates, one a site, lose beyond the sum of their losses, nats a token."""
        return self.curves.beyond_sum(
            (form, weight.name, dim)
            for site, one in zip(self.sites, chosen, strict=True)
            for weight, form, dim in zip(site.weights, one.forms, one.dims, strict=True)
        )

    def evidence(self, chosen: Iterable[Candidate]) -> Measured:
        """What plans of these candidates rest on: where latencies are modelled, also how far such ones are off.

        That is the largest median error of the workloads and of the schemes, of the GEMMs that have as many rows.
        """
        counted = [one for one in (*chosen, *(rows.candidate(0) for rows in self.dense)) if any(one.modelled)]
        if not counted:
            return self.measured
        dtypes = {scheme_named(name).dtype for one in counted for name in one.schemes}
        asked = product({workload.rows for workload in self.workloads}, sorted(dtypes))
        errors = [error for kind in asked if (error := self.profile.model.error(*kind)) is not None]
        used = replace(self.measured.profile, error=max(errors, default=None))
        return replace(self.measured, profile=used)

    def candidates(self, limited: Collection[str], besides: Collection[str] = ()) -> list[CandidateSet]:
        """The candidates of each site that matter where these cost columns are limited.

        Args:
            besides: cost columns that are to be small, and may be unknown where they are not limited.

        Raises:
            ModelError: a loss is not finite; names the weight, form, scheme and dim.
        """
        columns: Iterable[str] = (*limited, *besides)
        alike = self.recipe.space.schemes == (DEFAULT_SCHEME,)  # bytes are then as parameters are
        if alike:
            columns = [PARAMS if column == BYTES else column for column in columns]
        elif BYTES in columns and self.recipe.limits.budget == 1 and not self.may_outgrow:
            columns = [column for column in columns if column != PARAMS]
        compared = tuple(dict.fromkeys(columns))
        needed = tuple(column for column in compared if column in limited)
        if (compared, needed) not in self._made:
            self._check_losses()
            make = partial(candidates, space=self.recipe.space, timing=self.timing, limited=compared, needed=needed)
            self._made[compared, needed] = [make(site, self.curves) for site in self.sites]
        return self._made[compared, needed]

    def _check_losses(self) -> None:
        for (form, scheme, weight), curve in self.curves.by_key.items():
            wrong = np.flatnonzero(~np.isfinite(curve.loss))
            if len(wrong):
                raise ModelError(
                    f"{weight} in form {form} and scheme {scheme} loses {curve.loss[wrong[0]]} at dim {wrong[0]}",
                    "finite losses",
                    "Leave out the form or the scheme, or calibrate on other text; a scheme may be too narrow for the "
                    "weight's numbers.",
                )


@dataclass(frozen=True, eq=False)
class Instance:
    """Candidates as a knapsack.

    Attributes:
        sets: for each site the candidates whose costs are known wherever they are limited.
        groups: the same, with what is minimised and what they cost under each limit.
        limits: by cost column, in the order of the groups' costs.
    """

    sets: tuple[CandidateSet, ...]
    groups: tuple[Group, ...]
    limits: Mapping[str, int]

    def solve(self, start: Sequence[int] | None = None) -> Solution:
        """The choice of the smallest value, with its proof.

        Where that takes more than ``PATIENCE`` units of work, a choice that is proved to be ``CLOSE`` to it is taken.

        Args:
            start: a choice within the limits, where one is known.

        Raises:
            BudgetError: the limits cannot be met; says what can be.
        """
        names = [name_of(column) for column in self.limits]
        solve = partial(knapsack, self.groups, list(self.limits.values()), names=names)
        with suppress(BudgetError):  # of what is out of reach, or was not found with so little work
            solution = solve(work_limit=PATIENCE, start=start)
            if solution.certificate.gap <= CLOSE * solution.certificate.value:
                return solution
            start = solution.choice
        return solve(start=start)

    def chosen(self, solution: Solution) -> list[Candidate]:
        """Of each site the chosen one."""
        return [rows.candidate(item) for rows, item in zip(self.sets, solution.choice, strict=True)]

    def alternatives(self, solution: Solution) -> list[tuple[Candidate, ...]]:
        """For each site the best candidate with fewer parameters than the chosen one, and the best with more, if any.

        Where bytes are limited, these count instead of parameters.
        Best is the smallest value with what is used priced at the multipliers of the certificate (a candidate's
        Lagrangian value). So what holds against these two holds all the more against every other candidate of the site.
        """
        prices, found = np.array(solution.certificate.multipliers), []
        column = BYTES if BYTES in self.limits else PARAMS
        for rows, item, group in zip(self.sets, solution.choice, self.groups, strict=True):
            priced = group.values + group.costs @ prices
            size = rows.cost(column)
            sides = map(np.flatnonzero, (size < size[item], size > size[item]))
            found.append(tuple(rows.candidate(int(side[priced[side].argmin()])) for side in sides if len(side)))
        return found


def as_knapsack(sets: Sequence[CandidateSet], limits: Mapping[str, int]) -> Instance:
    """The knapsack of these candidates.

    Args:
        limits: the most that all sites may take together, by cost column.

    Raises:
        ProfileError: a site has no candidate whose costs are known.
    """
    known = [with_known_costs(rows, limits) for rows in sets]
    costs = [np.column_stack([rows.cost(column) for column in limits]) for rows in known]
    groups = [Group(rows.site, rows.loss, row) for rows, row in zip(known, costs, strict=True)]
    return Instance(tuple(known), tuple(groups), limits)


def with_known_costs(rows: CandidateSet, columns: Iterable[str]) -> CandidateSet:
    """The candidates of a site whose costs in these columns are known.

    Raises:
        ProfileError: there is none.
    """
    known = rows.known(columns)
    if not known.any():
        column = next((one for one in columns if not rows.known([one]).any()), next(iter(columns)))
        schemes = ", ".join(np.unique(rows.schemes).tolist())
        raise ProfileError(
            f"the profile lacks the latency of {rows.site} for {column.removeprefix('ns:')} in every form and scheme "
            f"that it may have (schemes {schemes})",
            "one of which it is known, since latency is limited",
            "Profile this model's shapes with gac profile --model NAME (--scheme NAME), or plan without a limit of "
            "latency: latency='any' (--latency any).",
        )
    return rows.at(known)
