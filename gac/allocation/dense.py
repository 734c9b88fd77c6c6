"""The dense model: what limits and ratios are relative to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from gac.allocation.candidate_set import CandidateSet
from gac.allocation.candidates import dense_candidate
from gac.allocation.latencies import BF16, UNKNOWN, Timing
from gac.allocation.split_latencies import SplitTiming
from gac.core.errors import ProfileError
from gac.forms.planned_sites import fuse_sites
from gac.models.sites import Site
from gac.plan.costs import floored, ns_of
from gac.plan.engines import ENGINES, TRANSFORMERS, Step
from gac.plan.recipe import Deployment, Recipe
from gac.plan.summary import profile_command
from gac.profiling.table import Profile
from gac.schemes import Scheme


def total(sets: Sequence[CandidateSet], column: str) -> int | None:
    """Sum a cost of one candidate a site; None where it is unknown."""
    costs = [int(rows.cost(column)[0]) for rows in sets]
    return None if UNKNOWN in costs else sum(costs)


@dataclass(frozen=True, eq=False)
class DenseModel:
    """The dense model as engines run it: weights of one input share a GEMM, however a plan runs them.

    Attributes:
        sets: its sites, with one candidate each.
        timing: the latencies of a plan's choices too.
    """

    sets: Sequence[CandidateSet]
    timing: Timing

    @classmethod
    def of(
        cls,
        sites: Sequence[Site],
        profile: Profile,
        deployment: Deployment,
        steps: Mapping[str, Step] = MappingProxyType({}),
        scheme: Scheme = BF16,
    ) -> "DenseModel":
        """Look up the latencies of sites, with whole steps in the engine by workload where they are known."""
        gpus, engine = deployment.tensor_parallel, ENGINES[deployment.engine or TRANSFORMERS.name]
        timing = (Timing if gpus == 1 else SplitTiming)(profile, deployment.parsed, gpus, engine, steps)
        return cls([dense_candidate(site, timing, scheme) for site in fuse_sites(sites, optional=True)], timing)

    @cached_property
    def gemms_ns(self) -> tuple[int | None, ...]:
        """Latencies of the sites' GEMMs, one a workload; None where unknown."""
        return tuple(total(self.sets, ns_of(workload)) for workload in self.timing.workloads)

    @cached_property
    def rest_ns(self) -> tuple[int, ...]:
        """The part of a served step beside the sites' GEMMs, one a workload; 0 where it is unknown."""
        rest = []
        for workload, gemms in zip(self.timing.workloads, self.gemms_ns, strict=True):
            step = self.timing.steps.get(str(workload))
            rest.append(0 if gemms is None or step is None else max(0, step.served_ns - gemms))
        return tuple(rest)

    @cached_property
    def latency_ns(self) -> tuple[int | None, ...]:
        """Latencies, one a workload: of a whole step in the engine, else of the sites' GEMMs; None where unknown."""
        steps = [self.timing.steps.get(str(workload)) for workload in self.timing.workloads]
        return tuple(gemms if step is None else step.dense_ns for step, gemms in zip(steps, self.gemms_ns, strict=True))

    def rest_of(self, column: str) -> int:
        """Return the part of a cost that no site has: of a latency ``rest_ns``, of all else 0."""
        return dict(zip(map(ns_of, self.timing.workloads), self.rest_ns, strict=True)).get(column, 0)

    def amount(self, column: str, recipe: Recipe | None = None) -> int:
        """Return a cost; raise ``ProfileError`` where it is a latency that the profile lacks.

        Args:
            recipe: for the command in the error, which measures what the recipe's engine runs.
        """
        latencies = dict(zip(map(ns_of, self.timing.workloads), self.latency_ns, strict=True))
        if (amount := latencies[column] if column in latencies else total(self.sets, column)) is None:
            site = next(rows.site for rows in self.sets if rows.cost(column)[0] == UNKNOWN)
            command = profile_command("NAME", recipe, *map(str, self.timing.workloads))
            raise ProfileError(
                f"the profile lacks the latency of {site} for {column.removeprefix('ns:')}",
                "known latencies, since latency is limited",
                f"Measure this model's shapes with {command}, or plan without a limit of latency: latency='any' "
                "(--latency any).",
            )
        return amount

    def allowed(self, recipe: Recipe) -> dict[str, int]:
        """Return the limit of each limited cost over all sites: less the rest of a step, which every choice takes.

        A limit of 1 always allows the dense model itself, where the plugin serves it more slowly than the engine.
        """
        limits = {}
        for column, share in recipe.fractions.items():
            limit = floored(share, self.amount(column, recipe)) - self.rest_of(column)
            limits[column] = max(limit, total(self.sets, column) or 0) if share == 1 else limit
        return limits
