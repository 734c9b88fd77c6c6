"""The dense model: what limits and ratios are relative to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType

from gac.allocation.candidate_set import CandidateSet
from gac.allocation.candidates import dense_candidate
from gac.allocation.dims import full_dim, runnable_dims
from gac.allocation.latencies import BF16, UNKNOWN, Timing
from gac.allocation.split_latencies import SplitTiming
from gac.core.errors import ProfileError
from gac.forms import DENSE
from gac.forms.planned_sites import fuse_sites
from gac.models.sites import Site
from gac.plan.costs import floored, ns_of
from gac.plan.engines import ENGINES, TRANSFORMERS, VLLM, Step
from gac.plan.recipe import Deployment, Recipe
from gac.plan.summary import profile_command
from gac.profiling.table import Profile, other_tables
from gac.schemes import DEFAULT_SCHEME, Scheme, scheme_named, scheme_of


def total(sets: Sequence[CandidateSet], column: str) -> int | None:
    """Sum a cost of one candidate a site; None where it is unknown."""
    costs = [int(rows.cost(column)[0]) for rows in sets]
    return None if UNKNOWN in costs else sum(costs)


@dataclass(frozen=True, eq=False)
class DenseModel:
    """The dense model as engines run it: weights of one input share a GEMM, however a plan runs them.

    Attributes:
        sites: with weights of one input as one site.
        sets: one candidate for each site.
        timing: the latencies of a plan's choices too.
    """

    sites: Sequence[Site]
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
        fused = fuse_sites(sites, optional=True)
        return cls(fused, [dense_candidate(site, timing, scheme) for site in fused], timing)

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
            recipe: for the error: the command that measures what the recipe's engine runs, and the shipped table that
                has it.
        """
        latencies = dict(zip(map(ns_of, self.timing.workloads), self.latency_ns, strict=True))
        if (amount := latencies[column] if column in latencies else total(self.sets, column)) is None:
            site = next(rows.site for rows in self.sets if rows.cost(column)[0] == UNKNOWN)
            command = profile_command("NAME", recipe, *map(str, self.timing.workloads))
            shipped = shipped_table(self.sites, self.timing.profile, recipe)
            raise ProfileError(
                f"the profile lacks the latency of {site} for {column.removeprefix('ns:')}",
                "known latencies, since latency is limited",
                f"Measure this model's shapes with {command}, or plan without a limit of latency: latency='any' "
                f"(--latency any).{shipped}",
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


def dense_by_scheme(sites: Sequence[Site], profile: Profile, recipe: Recipe) -> dict[str, DenseModel]:
    """Return the dense model in 16 bits, and in each scheme of a recipe: of the sites that can be stored in it."""
    run, models = recipe.deployment, dict[str, DenseModel]()
    engine = ENGINES[run.engine or TRANSFORMERS.name]
    for name in dict.fromkeys((DEFAULT_SCHEME, *recipe.space.schemes)):
        scheme, stored = scheme_named(name), partial(runnable_dims, DENSE, gpus=run.tensor_parallel, engine=engine)
        storable = [
            site
            for site in sites
            if all(len(stored(scheme_of(scheme, each), each, full_dim(each))) for each in site.weights)
        ]
        models[name] = DenseModel.of(storable, profile, run, scheme=scheme)
    return models


def shipped_table(sites: Sequence[Site], profile: Profile | None, recipe: Recipe | None) -> str:
    """Name another shipped table that has the latencies of a recipe's dense model, in its schemes, for all workloads.

    Returns:
        A sentence with the options that choose the table, after a space. Empty where there is no such table.
    """
    if profile is None or recipe is None:
        return ""
    space, run = recipe.space, recipe.deployment
    engines = [run.engine, *([VLLM.name] if VLLM.unserved(space.forms, space.schemes) is None else [])]
    for table in other_tables(profile):
        for engine in dict.fromkeys(engines):
            models = dense_by_scheme(sites, table, replace(recipe, deployment=replace(run, engine=engine)))
            if all(None not in model.latency_ns for model in models.values()):
                name, option = table.path.stem, "" if engine == run.engine else f" --engine {engine}"
                return f" The shipped table {name}, of {table.header.gpu}, has it: --profile {name}{option}."
    return ""
