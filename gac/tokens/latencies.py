"""What attention over the tokens that stay takes, from a latency table: layer by layer, and in all layers together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gac.allocation.latencies import DTYPE, INTERPOLATED, MEASURED, MODELLED, UNKNOWN, Latencies, look_up
from gac.core.arrays import Ints
from gac.core.errors import GacError, PlanError, ProfileError
from gac.core.workloads import Workload
from gac.models.attentions import Heads
from gac.plan.plan import WorkloadLatency
from gac.profiling.table import Profile


@dataclass(frozen=True, eq=False)
class Attending:
    """Attention of one new token a text over the cache of every layer.

    Attributes:
        heads: of every layer.
        profile: the table; without one every latency is unknown.
        cut: how many layers a press may cut.
        whole: how many it may not.
        window: the tokens that these cache at most.
    """

    heads: Heads
    profile: Profile | None
    cut: int
    whole: int = 0
    window: int | None = None

    def each(self, workload: Workload, tokens: Sequence[int]) -> Latencies:
        """ns of one layer with each of these numbers of cached tokens, -1 where unknown, and how they are known."""
        sizes = np.array(tokens, dtype=np.int64)
        if self.profile is None:
            return np.full(len(sizes), UNKNOWN), np.full(len(sizes), MEASURED)
        return look_up(self.profile, self.heads.over(workload.batch, workload.tokens), "t", sizes, DTYPE)

    def beside(self, workload: Workload) -> list[int]:
        """The tokens that each layer caches which no press cuts."""
        return [min(workload.tokens, self.window or workload.tokens)] * self.whole

    def together(self, workload: Workload, kept: Sequence[int]) -> WorkloadLatency:
        """All layers, dense and with these numbers of tokens in those that are cut."""
        beside = self.beside(workload)
        dense, _ = self.each(workload, [workload.tokens] * self.cut + beside)
        planned, how = self.each(workload, [*kept, *beside])
        known = planned != UNKNOWN
        measured, interpolated, modelled = (
            int((known & (how == one)).sum()) for one in (MEASURED, INTERPOLATED, MODELLED)
        )
        sums = _sum(dense), _sum(planned)
        return WorkloadLatency(str(workload), *sums, measured, interpolated, int((~known).sum()), modelled)

    def dense_ns(self, workload: Workload) -> int:
        """All layers, dense.

        Raises:
            ProfileError: the table lacks it.
        """
        found = self.together(workload, [workload.tokens] * self.cut).dense_ns
        if found is None:
            raise ProfileError(
                f"a limit of latency at {workload}, where the profile lacks attention over the whole cache",
                "a table that has it",
                f"Measure it with gac profile --model NAME --tokens --workload {workload}, or plan without the limit.",
            )
        return found


def _sum(ns: Ints) -> int | None:
    return None if (ns == UNKNOWN).any() else int(ns.sum())


def decoding(names: Sequence[str]) -> tuple[Workload, ...]:
    """These workloads.

    Raises:
        GacError: one is none, or a prompt, of which attention sees all tokens before any is evicted.
    """
    found = tuple(Workload.parse(name) for name in dict.fromkeys(names))
    for one in found:
        if one.phase == "prefill":
            given = f"workload {one} of a plan of tokens, which are evicted after a prompt was read"
            raise GacError(given, "decode:B@C", "Name what is decoded after a context, such as decode:1@1024.")
    return found


def limited(latency: float | dict[str, float] | None, workloads: Sequence[Workload]) -> dict[str, float]:
    """The allowed fraction by workload.

    Raises:
        PlanError: a limit is of a workload that is not among them.
    """
    names = [str(one) for one in workloads]
    if latency is None:
        return {}
    if not isinstance(latency, dict):
        return dict.fromkeys(names, float(latency))
    found = {str(Workload.parse(name)): float(fraction) for name, fraction in latency.items()}
    if other := next((name for name in found if name not in names), None):
        listed = ", ".join(names) or "no workload"
        raise PlanError(f"a limit of latency at {other}", f"one of {listed}", f"Name the workload too: {other}.")
    return found
