"""The plan: its record, checked when it is made or loaded, shown as tables and set beside another one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gac.core.arguments import checked
from gac.core.display import Row, Shown, Table, fields
from gac.core.errors import PlanError
from gac.plan.choices import Candidate, SiteChoice, WeightChoice, check, check_candidate, check_site, counted
from gac.plan.evidence import UNMEASURED, Calibration, CalibrationPart, Healed, Measured, ProfileUsed, RoundedHead
from gac.plan.layers import plan_table, short_names_of
from gac.plan.record import (
    AnyLatency,
    Certificate,
    Limit,
    PlanRecord,
    Prediction,
    SingleGpuComparison,
    Speed,
    TextPrediction,
    WorkloadLatency,
    amounts,
)
from gac.plan.summary import summary
from gac.schemes import DEFAULT_SCHEME

__all__ = [
    "SCHEMA",
    "UNMEASURED",
    "AnyLatency",
    "Calibration",
    "CalibrationPart",
    "Candidate",
    "Certificate",
    "Healed",
    "Limit",
    "Measured",
    "Plan",
    "PlanComparison",
    "Prediction",
    "ProfileUsed",
    "RoundedHead",
    "SingleGpuComparison",
    "SiteChoice",
    "Speed",
    "TextPrediction",
    "WeightChoice",
    "WeightDifference",
    "WorkloadLatency",
    "amounts",
    "check",
    "check_candidate",
    "counted",
]

SCHEMA = 2


@dataclass(frozen=True, repr=False)
class Plan(Shown, PlanRecord):
    """One candidate for every site, and everything needed to judge and to apply the choice.

    Its fields are those of ``gac.plan.record.PlanRecord``.
    """

    def __post_init__(self) -> None:
        self._check_schema(self.schema_version, SCHEMA)
        _check(self)

    def summary(self) -> str:
        """The plan in words, a dozen lines of plain text."""
        return summary(self)

    def tables(self) -> Sequence[Table | str]:
        return plan_table(self), self.summary()

    def rows(self) -> Sequence[Row]:
        short, names = short_names_of(self.sites), [f"site_latency_ns {timed.workload}" for timed in self.workloads]
        return [
            {
                "layer": site.layer,
                "kind": short[choice.name],
                "weight": choice.name,
                **fields(choice, "form", "dim", "scheme"),
                **fields(choice.weight, "out_features", "in_features"),
                "params": choice.params,
                "dense_params": choice.weight.params,
                "kept": choice.params / choice.weight.params,
                "bytes": choice.bytes,
                "aligned": choice.aligned,
                "site": site.site,
                "site_loss": site.loss,
                **dict(zip(names, site.latency_ns, strict=True)),
            }
            for site in self.sites
            for choice in site.weights
        ]

    @checked
    def compare(self, other: "Plan | str | Path") -> "PlanComparison":
        """Compare with another plan for the same model, or the path of one.

        Raises:
            PlanError: the plans are for different weights.
        """
        other = Plan.opened(other)
        first, second = self.measured, other.measured
        if first.digest != second.digest:
            raise PlanError(
                f"a plan for {first.model} ({first.digest[:12]}) beside one for {second.model} ({second.digest[:12]})",
                "plans for the same model",
                "Compare plans that were made for the same weights.",
            )
        pairs = map(WeightDifference, self.weights, other.weights)
        differences = tuple(pair for pair in pairs if pair.first.becomes != pair.second.becomes)
        return PlanComparison(self, other, differences)


@dataclass(frozen=True)
class WeightDifference:
    """One weight that two plans choose differently."""

    first: WeightChoice
    second: WeightChoice

    @property
    def params(self) -> int:
        """Parameters that the second plan keeps more than the first."""
        return self.second.params - self.first.params

    @property
    def bytes(self) -> int:
        """Bytes that the second plan keeps more than the first."""
        return self.second.bytes - self.first.bytes


@dataclass(frozen=True)
class PlanComparison:
    """Two plans for one model; ``differences`` has the weights with another choice, in model order."""

    first: Plan
    second: Plan
    differences: tuple[WeightDifference, ...]

    @property
    def same_prediction(self) -> bool:
        """True if both losses were measured by the same method, in as many shots, on the same text."""
        plans = ((plan.recipe.measure, plan.measured.calibration) for plan in (self.first, self.second))
        first, second = ((measure.method, measure.shots, text) for measure, text in plans)
        return first == second


def _check(plan: Plan) -> None:
    """Refuse a plan that contradicts itself; amounts are counted again in exact integers."""
    for name in ("sites", "limits"):
        check(bool(getattr(plan, name)), f"plan has no {name}", "one at least")
    for site in plan.sites:
        check_site(site)
    for name, value, holds in _conditions(plan):
        check(holds, f"plan has {name}={value!r}", "what its recipe and its choices allow")
    fractions, stated = plan.recipe.fractions, {limit.column: limit.asked for limit in plan.limits}
    check([*stated.items()] == [*fractions.items()], f"plan limits {stated}", f"{fractions}, as its recipe says")
    for limit in plan.limits:
        counts = amounts(plan.weights, plan.workloads, limit.column)
        check(counts is not None, f"plan limits {limit.column!r}", "a cost that it has")
        used, total = counts or (0, 0)
        over = max(0, limit.used - limit.limit)
        check(
            (used, total, over) == (limit.used, limit.total, limit.over),
            f"plan states {limit.used} of {limit.total} {limit.column}, limit {limit.limit}, {limit.over} over it",
            f"{used} of {total}, {over} over the limit",
        )
    for choice in plan.weights if plan.gpus > 1 else ():
        problem = f"plan for {plan.gpus} GPUs has {choice.name} as {choice.form} {choice.dim} in {choice.scheme}"
        check(choice.divides(plan.gpus), problem, "what they divide into equal parts")


def _conditions(plan: Plan) -> Iterator[tuple[str, object, bool]]:
    """Names of fields and their values, each with True if the value is possible beside the others."""
    measured, text, head = plan.measured, plan.measured.calibration, plan.measured.head
    limits, workloads, space = len(plan.limits), len(plan.workloads), plan.recipe.space
    for name in ("windows", "window_tokens") if measured.predicted else ():
        yield f"measured.calibration.{name}", getattr(text, name), getattr(text, name) > 0
    yield "measured.params", measured.params, measured.params >= plan.budget.total
    yield "measured.profile.error", measured.profile.error, (measured.profile.error or 0) >= 0
    rotated = bool(space.rotate) == (measured.rotation is not None)
    yield "measured.rotation", measured.rotation, rotated and measured.untied >= 0
    others = measured.params + measured.untied - plan.budget.total - (head.params if head else 0)
    alike = all(len({choice.becomes for choice in choices}) == 1 for choices in plan.experts)
    yield "recipe.space.same_count", space.same_count, alike or not space.same_count
    yield "measured.head", head, others >= 0 and (head is None or head.is_valid)
    texts, predicted = [part.text for part in text.parts], [by.text for by in plan.prediction.by_text]
    extra = len(predicted) - len(texts)  # a text that is not calibrated on
    yield "prediction.by_text", predicted, not predicted or (predicted[: len(texts)] == texts and 0 <= extra <= 1)
    yield "recipe.space.head", space.head, space.head == (head.scheme if head else DEFAULT_SCHEME)
    yield "prediction.head", plan.prediction.head, measured.lost_by_head == plan.prediction.head
    yield "healed", plan.healed, all(healed.is_valid for healed in plan.healed)
    for limit in plan.limits:
        yield f"limits.{limit.column}", limit.limit, limit.limit >= 0
    for timed in plan.workloads:
        for name in ("dense_ns", "plan_ns"):
            yield f"{timed.workload}.{name}", (ns := getattr(timed, name)), ns is None or ns > 0
    proof, priced = plan.certificate, any(site.alternatives for site in plan.sites)
    yield "certificate", proof, proof.is_valid and (not priced or len(proof.multipliers) == limits)
    if (speed := plan.speed) is not None:
        shape = len(speed.latency_ns), len(speed.certificate.multipliers)
        yield "speed", speed, shape == (workloads, limits + 1) and speed.certificate.is_valid
    if (free := plan.any_latency) is not None:
        known = min(filter(None, free.latency_ns), default=0) >= 0 and free.loss <= proof.value
        yield "any_latency", free, len(free.latency_ns) == workloads and known
    if (single := plan.one_gpu) is not None:
        counts = (*single.forms.values(), single.otherwise, single.uneven, single.unsound, *single.latency_ns)
        positive = min(filter(None, counts), default=0) >= 0
        yield "one_gpu", single, plan.gpus > 1 and len(single.latency_ns) == workloads and positive
