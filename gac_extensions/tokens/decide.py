"""Choose one budget of tokens a layer with the exact knapsack, within limits of tokens and of attention latency."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gac.allocation.knapsack import Group, knapsack
from gac.allocation.latencies import DTYPE, INTERPOLATED, MEASURED, MODELLED, UNKNOWN, Latencies, look_up
from gac.core.arrays import Floats
from gac.core.errors import GacError, PlanError, ProfileError
from gac.core.workloads import Workload
from gac.models.attentions import Heads
from gac.plan.costs import floored
from gac.plan.plan import Certificate, WorkloadLatency
from gac.profiling.table import Profile
from gac_extensions.tokens.plan import LayerTokens, kept_of


@dataclass(frozen=True, eq=False)
class AttentionLatency:
    """Latency of attention of one new token a text over the cache of every layer."""

    heads: Heads
    profile: Profile | None  # without one every latency is unknown
    cut: int  # number of layers that a press may cut
    uncut: int = 0  # number of the others
    window: int | None = None  # tokens that these cache at most

    def by_tokens(self, workload: Workload, tokens: Sequence[int]) -> Latencies:
        """ns of one layer for each number of cached tokens, -1 if unknown, and how each was obtained."""
        sizes = np.array(tokens, dtype=np.int64)
        if self.profile is None:
            return np.full(len(sizes), UNKNOWN), np.full(len(sizes), MEASURED)
        return look_up(self.profile, self.heads.over(workload.batch, workload.tokens), "t", sizes, DTYPE)

    def uncut_tokens(self, workload: Workload) -> list[int]:
        return [min(workload.tokens, self.window or workload.tokens)] * self.uncut

    def total(self, workload: Workload, kept: Sequence[int]) -> WorkloadLatency:
        """Latency of all layers: dense, and with ``kept`` tokens in the layers that are cut."""
        uncut = self.uncut_tokens(workload)
        dense, _ = self.by_tokens(workload, [workload.tokens] * self.cut + uncut)
        planned, source = self.by_tokens(workload, [*kept, *uncut])
        sums = [None if (ns == UNKNOWN).any() else int(ns.sum()) for ns in (dense, planned)]
        sources = Counter(np.where(planned == UNKNOWN, UNKNOWN, source).tolist())
        counts = [sources[kind] for kind in (MEASURED, INTERPOLATED, UNKNOWN, MODELLED)]
        return WorkloadLatency(str(workload), sums[0], sums[1], *counts)


def decode_workloads(names: Sequence[str]) -> tuple[Workload, ...]:
    """Parse workloads; raises GacError for a prefill, in which attention sees all tokens before any is evicted."""
    workloads = tuple(Workload.parse(name) for name in dict.fromkeys(names))
    for workload in workloads:
        if workload.phase == "prefill":
            problem = f"workload {workload} of a plan of tokens, which are evicted after a prompt was read"
            raise GacError(problem, "decode:B@C", "Name what is decoded after a context, such as decode:1@1024.")
    return workloads


def latency_fractions(latency: float | dict[str, float] | None, workloads: Sequence[Workload]) -> dict[str, float]:
    """The allowed fraction by workload; raises PlanError if a limit is for another workload."""
    names = [str(workload) for workload in workloads]
    if not isinstance(latency, dict):
        return {} if latency is None else dict.fromkeys(names, float(latency))
    fractions = {str(Workload.parse(name)): float(fraction) for name, fraction in latency.items()}
    if other := next((name for name in fractions if name not in names), None):
        listed = ", ".join(names) or "no workload"
        raise PlanError(f"a limit of latency at {other}", f"one of {listed}", f"Name the workload too: {other}.")
    return fractions


@dataclass(frozen=True)
class TimeLimit:
    """Limit of the attention latency at a workload, for all layers."""

    name: str
    ns: tuple[int, ...]  # of one layer that is cut, by budget; -1 if unknown
    uncut_ns: int  # sum over the layers that are not cut
    limit: int  # ns for all layers

    @classmethod
    def of(
        cls, latency: AttentionLatency, workload: Workload, fraction: float, budgets: Sequence[int], step: int
    ) -> "TimeLimit":
        """A fraction of the dense latency; a ProfileError if the table lacks it, or that of every smaller budget.

        The last budget is the priced context.
        """
        dense = latency.total(workload, [workload.tokens] * latency.cut).dense_ns
        if dense is None:
            raise _lacks(workload, "the whole cache", "a table that has it")
        kept = [kept_of(budget, budgets[-1], workload.tokens, step) for budget in budgets]
        ns = latency.by_tokens(workload, kept)[0].tolist()
        if len(budgets) > 1 and max(ns[:-1]) == UNKNOWN:
            lengths = f"{kept[0]:,} to {kept[-2]:,} of {workload.tokens:,} tokens"
            raise _lacks(workload, lengths, "a table that has some of it")
        uncut = latency.by_tokens(workload, latency.uncut_tokens(workload))[0].sum()
        return cls(f"the limit of latency at {workload}", tuple(ns), int(uncut), floored(fraction, dense))


def _lacks(workload: Workload, lengths: str, expected: str) -> ProfileError:
    problem = f"a limit of latency at {workload}, where the profile lacks attention over {lengths}"
    remedy = f"Measure it with gac profile --model NAME --tokens --workload {workload}, or plan without the limit."
    return ProfileError(problem, expected, remedy)


def decide(
    layers: Sequence[int], budgets: Sequence[int], losses: Floats, limit: int, times: Sequence[TimeLimit] = ()
) -> tuple[Certificate, tuple[LayerTokens, ...]]:
    """Minimise the summed loss, shape ``(layers, budgets)``, within a limit of tokens for all layers, and of latency.

    Budgets of unknown latency are excluded if latency is limited. A BudgetError says if no choice is within the limits,
    a ProfileError if no budget has a known latency at every limited workload.
    """
    usable = [item for item in range(len(budgets)) if all(time.ns[item] != UNKNOWN for time in times)]
    if not usable:
        raise ProfileError(
            f"a profile without any number of tokens whose latency is known for {', '.join(t.name for t in times)}",
            "one of which it is",
            "Measure attention with gac profile --model NAME --tokens, or plan without the limits of latency.",
        )
    costs = [[budgets[item], *(time.ns[item] for time in times)] for item in usable]
    groups = [Group(f"layer {layer}", row[usable], costs) for layer, row in zip(layers, losses, strict=True)]
    if any(time.uncut_ns for time in times):
        groups.append(Group("layers of a sliding window", [0.0], [[0, *(time.uncut_ns for time in times)]]))
    names = ["the limit of tokens kept in all layers", *(time.name for time in times)]
    solution = knapsack(groups, [limit, *(time.limit for time in times)], names=names)
    chosen = [budgets[usable[item]] for item in solution.choice[: len(layers)]]
    priced = [tuple(zip(budgets, row.tolist(), strict=True)) for row in losses]
    return solution.certificate, tuple(map(LayerTokens, layers, chosen, priced))
