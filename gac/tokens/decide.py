"""The choice: one budget of tokens a layer, by the knapsack of the weights, within limits of tokens and of latency."""

from collections.abc import Sequence
from dataclasses import dataclass

from gac.allocation.knapsack import Group, knapsack
from gac.allocation.latencies import UNKNOWN
from gac.core.arrays import Floats
from gac.core.errors import ProfileError
from gac.core.workloads import Workload
from gac.plan.costs import floored
from gac.plan.plan import Certificate
from gac.plan.token_plan import LayerTokens, kept_of
from gac.tokens.latencies import Attending


@dataclass(frozen=True)
class TimeLimit:
    """What attention may take at a workload, all layers together.

    Attributes:
        name: what an error calls it.
        ns: of one layer that is cut, with each budget; -1 where unknown.
        beside: of the layers that are not cut, together.
        limit: of all of them.
    """

    name: str
    ns: tuple[int, ...]
    beside: int
    limit: int

    @classmethod
    def of(
        cls, attending: Attending, workload: Workload, fraction: float, budgets: Sequence[int], step: int
    ) -> "TimeLimit":
        """A fraction of the dense model's.

        Args:
            budgets: of the priced context, which is the last of them.

        Raises:
            ProfileError: the table lacks what the dense model takes, or every smaller budget.
        """
        whole = attending.dense_ns(workload)
        kept = [kept_of(own, budgets[-1], workload.tokens, step) for own in budgets]
        ns = attending.each(workload, kept)[0].tolist()
        if len(budgets) > 1 and max(ns[:-1]) == UNKNOWN:
            raise ProfileError(
                f"a limit of latency at {workload}, where the profile lacks attention over {kept[0]:,} to {kept[-2]:,} "
                f"of {workload.tokens:,} tokens",
                "a table that has some of it",
                f"Measure it with gac profile --model NAME --tokens --workload {workload}, or plan without the limit.",
            )
        beside = attending.each(workload, attending.beside(workload))[0].sum()
        return cls(f"the limit of latency at {workload}", tuple(ns), int(beside), floored(fraction, whole))


@dataclass(frozen=True)
class Decision:
    """One budget a layer, with the proof.

    Attributes:
        limit: tokens that all layers may keep together.
    """

    limit: int
    certificate: Certificate
    layers: tuple[LayerTokens, ...]

    def kept(self, workload: Workload, context: int, step: int) -> list[int]:
        """Tokens that each layer keeps of a workload's context."""
        return [kept_of(one.kept, context, workload.tokens, step) for one in self.layers]


def decide(
    layers: Sequence[int], budgets: Sequence[int], losses: Floats, limit: int, times: Sequence[TimeLimit] = ()
) -> Decision:
    """The least summed loss within the limits; budgets of unknown latency are no choice where it is limited.

    Args:
        losses: shape ``(layers, budgets)``.
        limit: of tokens, all layers together.

    Raises:
        BudgetError: no choice is within the limits.
        ProfileError: no budget has a known latency in every one that is limited.
    """
    usable = [at for at in range(len(budgets)) if all(one.ns[at] != UNKNOWN for one in times)]
    if not usable:
        raise ProfileError(
            f"a profile without any number of tokens whose latency is known for {', '.join(one.name for one in times)}",
            "one of which it is",
            "Measure attention with gac profile --model NAME --tokens, or plan without the limits of latency.",
        )
    costs = [[budgets[at], *(one.ns[at] for one in times)] for at in usable]
    groups = [Group(f"layer {layer}", own[usable], costs) for layer, own in zip(layers, losses, strict=True)]
    if any(one.beside for one in times):
        groups.append(Group("layers of a sliding window", [0.0], [[0, *(one.beside for one in times)]]))
    names = ["the limit of tokens kept in all layers", *(one.name for one in times)]
    solution = knapsack(groups, [limit, *(one.limit for one in times)], names=names)
    priced = [tuple(zip(budgets, own.tolist(), strict=True)) for own in losses]
    chosen = zip(layers, solution.choice[: len(layers)], priced, strict=True)
    found = tuple(LayerTokens(layer, budgets[usable[item]], own) for layer, item, own in chosen)
    return Decision(limit, solution.certificate, found)
