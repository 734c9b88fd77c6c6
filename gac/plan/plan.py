"""The plan: one candidate a site, with what it was made from and what it promises."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gac.core.arguments import checked
from gac.core.display import Shown
from gac.core.errors import PlanError
from gac.core.io import Record
from gac.forms import form_named
from gac.forms.tensor_parallel import split_matrices
from gac.plan.choices import REMEDY, Candidate, SiteChoice, WeightChoice, check, check_candidate, check_site, counted
from gac.plan.costs import BYTES, COSTS, KV_NUMBERS, PARAMS, ns_of
from gac.plan.evidence import UNMEASURED, Calibration, CalibrationPart, Healed, Measured, ProfileUsed, RoundedHead
from gac.plan.recipe import Recipe
from gac.plan.summary import summary
from gac.schemes import DEFAULT_SCHEME, scheme_named

__all__ = [
    "SCHEMA",
    "UNMEASURED",
    "Calibration",
    "CalibrationPart",
    "Candidate",
    "Certificate",
    "Healed",
    "Limit",
    "Measured",
    "OneGpu",
    "Plan",
    "PlanComparison",
    "Prediction",
    "ProfileUsed",
    "RoundedHead",
    "SiteChoice",
    "Speed",
    "WeightChoice",
    "WeightDifference",
    "WorkloadLatency",
    "amounts",
    "check",
    "check_candidate",
    "counted",
]

SCHEMA = 2


@dataclass(frozen=True)
class Limit:
    """What all choices together may take of one resource, and what they take.

    Attributes:
        column: the cost: ``params`` and ``bytes`` of the targeted weights, ``kv_numbers`` (numbers that the KV cache
            keeps of a token in all layers, 2 bytes each in bf16, and as many as rounded ones fill) or ``ns:WORKLOAD``.
        asked: the allowed fraction of the dense model's.
        limit: ``floor(asked * total)``.
        used: what the chosen candidates take.
        total: what the dense weights take.
        over: by how much a rule that keeps no limit overshot it, ``max(0, used - limit)``; 0 in every plan that GAC's
            own choice made.
    """

    column: str
    asked: float
    limit: int
    used: int
    total: int
    over: int = 0

    @property
    def kept(self) -> float:
        return self.used / self.total


@dataclass(frozen=True)
class WorkloadLatency:
    """Predicted latency of the targeted weights, ns, with how each of the plan's numbers was obtained.

    ``dense_ns`` and ``plan_ns`` are None where the profile lacks a shape and cannot vouch for a modelled latency
    (``unknown`` counts the weights). ``fused_ns`` is the dense model's with shared first GEMMs everywhere, which loses
    nothing; None likewise, in plans that do not say it, and of attention, which has none.
    """

    workload: str
    dense_ns: int | None
    plan_ns: int | None
    measured: int
    interpolated: int
    unknown: int
    modelled: int = 0
    fused_ns: int | None = None


@dataclass(frozen=True)
class Prediction:
    """What the plan promises: ``loss`` nats a token more than dense.

    ``dense_perplexity`` and ``perplexity`` are on the calibration text. ``together`` is the part of the loss beyond the
    sum over the sites: what was measured of pairs of choices, of all latents together, and of some choices on text.
    ``head`` is the part that rounding embedding and head loses, which no choice changes.
    """

    loss: float
    dense_perplexity: float
    perplexity: float
    together: float = 0.0
    head: float = 0.0

    @property
    def summed(self) -> float:
        """What the choices lose by themselves: what was minimised, or limited where latency was."""
        return self.loss - self.together - self.head


@dataclass(frozen=True)
class Certificate:
    """The solver's proof, in the units of the objective (nats a token).

    Attributes:
        status: ``optimal`` when the gap is 0, ``feasible`` otherwise.
        value: loss of the solution.
        lower_bound: no choice within the limits loses less.
        gap: ``value - lower_bound``.
        multipliers: the Lagrange multiplier of each limit (loss per unit) behind the bound.
        method: how the solution was found.
    """

    status: Literal["optimal", "feasible"]
    value: float
    lower_bound: float
    gap: float
    multipliers: tuple[float, ...]
    method: str


@dataclass(frozen=True)
class Speed:
    """What was given for speed: the plan is the fastest of the choices that lose at most the recipe's ``slack`` more.

    Attributes:
        loss: the least that a choice within the limits loses, nats a token; the plan's certificate proves it.
        latency_ns: what that choice takes, one a workload; None where unknown.
        certificate: that no choice within the limits and the slack is faster. Its value is the sum of the latencies,
            each as a fraction of the dense model's. It has one multiplier a limit, and last that of a nat.
    """

    loss: float
    latency_ns: tuple[int | None, ...]
    certificate: Certificate


@dataclass(frozen=True)
class OneGpu:
    """What the same curves and limits give for one GPU, beside a plan for several; by how it differs.

    Attributes:
        loss: predicted, nats a token.
        forms: dense parameters of the weights that take each form there.
        otherwise: weights that become something else there.
        uneven: weights whose dims there cannot be divided over the GPUs in equal parts.
        unsound: weights whose dims can, into parts of which the table shows that they are slow.
        latency_ns: what that plan takes on the GPUs, one a workload, with zeros filled in where dims are uneven; None
            where the table lacks it, or where that cannot be done.
    """

    loss: float
    forms: dict[str, int]
    otherwise: int
    uneven: int
    unsound: int
    latency_ns: tuple[int | None, ...]


@dataclass(frozen=True, repr=False)
class Plan(Shown, Record):
    """One candidate for every site, and everything needed to judge and to apply the choice.

    Attributes:
        recipe: what was asked for, with what was left open decided: the refit, the forms of the method.
        limits: what is limited, the parameters first.
        certificate: of the least loss; it has one multiplier a limit, in the same order.
        speed: what was given for speed; None where the plan is the choice of least loss.
        one_gpu: of a plan for several GPUs, what would be chosen for one; None where that was not made, or where no
            choice for one GPU keeps the limits.
        healed: how the model that carries the plan was trained since, in order; empty of a plan that was just made.
    """

    schema_version: int
    gac_version: str
    recipe: Recipe
    measured: Measured
    limits: tuple[Limit, ...]
    workloads: tuple[WorkloadLatency, ...]
    prediction: Prediction
    certificate: Certificate
    sites: tuple[SiteChoice, ...]
    speed: Speed | None = None
    one_gpu: OneGpu | None = None
    healed: tuple[Healed, ...] = ()
    _error = PlanError
    _taken_for = "press", "a plan of tokens kept", "Evict with gac.press; gac allocate makes plans of weights."

    def __post_init__(self) -> None:
        self._check_schema(self.schema_version, SCHEMA)
        _check_counts(self)

    @property
    def budget(self) -> Limit:
        """The limit of the parameters."""
        return self.limits[0]

    def limit(self, column: str) -> Limit | None:
        """The limit of a cost column; None where it is not limited."""
        return next((one for one in self.limits if one.column == column), None)

    @property
    def prices(self) -> tuple[float, ...]:
        """What a unit of each limit is worth to the choice, in nats a token; of latency also what it is minimised for.

        Raises:
            AssertionError: loss did not limit the fastest choice, so that nothing has a price in it.
        """
        if self.speed is None:
            return self.certificate.multipliers
        *paid, nat = self.speed.certificate.multipliers
        assert nat > 0, "no price in nats"
        dense = {ns_of(one.workload): one.dense_ns for one in self.workloads if one.dense_ns}
        share = [1 / dense[limit.column] if limit.column in dense else 0.0 for limit in self.limits]
        return tuple((price + own) / nat for price, own in zip(paid, share, strict=True))

    @property
    def size(self) -> Limit:
        """The limit by which a choice is called smaller than another: that of bytes, else the budget."""
        return self.limit(BYTES) or self.budget

    @property
    def kept_of_model(self) -> float:
        """Kept fraction of the whole model's parameters; a head that rotation has untied counts among those kept."""
        whole = self.measured.params
        return (whole - self.budget.total + self.budget.used + self.measured.untied) / whole

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of the targeted weights, scales and zero points among them: as planned, and dense in 16 bits."""
        return counted(self.weights, BYTES)

    @property
    def model_bytes(self) -> tuple[int, int]:
        """Bytes of the whole model, tied weights once: as planned, and dense.

        What is not targeted is in 16 bits, but for embedding and head where they are rounded. A head that rotation has
        untied is in the plan's, and not in the dense model's.
        """
        plain, head, (used, total) = scheme_named(DEFAULT_SCHEME), self.measured.head, self.bytes
        others = self.measured.params - self.budget.total
        kept = others + self.measured.untied - (head.params if head else 0)
        return plain.bytes(1, kept) + (head.bytes if head else 0) + used, plain.bytes(1, others) + total

    @property
    def bits(self) -> tuple[float, float]:
        """Bits for each dense parameter, scales and zero points among them: of the targeted weights, of the model."""
        return 8 * self.bytes[0] / self.budget.total, 8 * self.model_bytes[0] / self.measured.params

    @property
    def kv_numbers(self) -> tuple[int, int]:
        """Numbers of 16 bits that the KV cache keeps of a token: of this plan, and of the dense model."""
        return counted(self.weights, KV_NUMBERS)

    @property
    def gpus(self) -> int:
        """Over how many GPUs every weight is split."""
        return self.recipe.deployment.tensor_parallel

    @property
    def on_each_gpu(self) -> dict[str, int]:
        """What one of the GPUs holds of the targeted weights and of the KV cache of a token, by cost column.

        Scales of rows whose columns are divided are on every GPU: bytes may be a little more than an equal part.
        """
        parts = [(one, split_matrices(form_named(one.form), one.weight, one.dim, self.gpus)) for one in self.weights]
        return {
            PARAMS: sum(rows * columns for _, matrices in parts for rows, columns in matrices),
            BYTES: sum(scheme_named(one.scheme).bytes(*shape) for one, matrices in parts for shape in matrices),
            KV_NUMBERS: sum(counted([one], KV_NUMBERS)[0] // one.weight.parts(self.gpus) for one in self.weights),
        }

    @property
    def weights(self) -> tuple[WeightChoice, ...]:
        """Every weight's choice, in model order."""
        return tuple(weight for site in self.sites for weight in site.weights)

    @property
    def documents(self) -> tuple[str, ...]:
        """The digests of the documents, given in memory, that it was calibrated or its model was healed on."""
        return self.measured.calibration.documents + tuple(digest for one in self.healed for digest in one.documents)

    @property
    def alignment(self) -> dict[str, int]:
        """How many chosen dims (of weights that are not dense) are multiples of 64, 32, 16, 8, or none.

        Of heads and blocks their features count; where weights are split, what each GPU has.
        """
        changed = [one for one in self.weights if not one.is_dense]
        steps, dims = ("64", "32", "16", "8"), [one.length_on(self.gpus) for one in changed]
        kinds = [next((step for step in steps if dim % int(step) == 0), "unaligned") for dim in dims]
        return {kind: kinds.count(kind) for kind in (*steps, "unaligned")}

    @property
    def aligned_fraction(self) -> float:
        """Fraction of the chosen dims that are multiples of 8 (1.0 when everything stayed dense)."""
        counts = self.alignment
        total = sum(counts.values())
        return 1.0 if total == 0 else 1 - counts["unaligned"] / total

    @checked
    def compare(self, other: "Plan | str | Path") -> "PlanComparison":
        """This plan beside another one for the same model, or the path of one.

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

    def summary(self) -> str:
        """The plan in words, a dozen lines of plain text."""
        return summary(self)


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
    """Two plans for one model, side by side.

    Attributes:
        differences: the weights that become something else, in model order.
    """

    first: Plan
    second: Plan
    differences: tuple[WeightDifference, ...]

    @property
    def same_prediction(self) -> bool:
        """Whether both losses were measured by the same method, in as many shots, on the same text."""
        asked = (self.first.recipe.measure, self.second.recipe.measure)
        first, second = ((one.method, one.shots) for one in asked)
        return first == second and self.first.measured.calibration == self.second.measured.calibration


def _check_counts(plan: Plan) -> None:
    """Count everything again in exact integers; a plan that contradicts itself is refused."""
    for name in ("sites", "limits"):
        check(bool(getattr(plan, name)), f"plan has no {name}", "one at least")
    _check_ranges(plan)
    for site in plan.sites:
        check_site(site)
    prices, limits, recipe = len(plan.certificate.multipliers), len(plan.limits), plan.recipe.fractions
    priced = prices == limits or not any(site.alternatives for site in plan.sites)
    check(priced, f"plan has alternatives and {prices} multipliers", f"{limits}, one a limit")
    if plan.speed is not None:
        shape = len(plan.speed.latency_ns), len(plan.speed.certificate.multipliers)
        given = f"plan has speed with {shape[0]} latencies and {shape[1]} multipliers"
        check(shape == (len(plan.workloads), limits + 1), given, f"{len(plan.workloads)} and {limits + 1}")
    rotated, rotation = bool(plan.recipe.space.rotate), plan.measured.rotation
    check(rotated == (rotation is not None), f"plan with rotate {rotated} states {rotation}", "what was rotated")
    _check_head(plan)
    asked = {limit.column: limit.asked for limit in plan.limits}
    as_asked = list(asked.items()) == list(recipe.items())
    check(as_asked, f"plan limits {asked}", f"{recipe}, as its recipe says")
    for limit in plan.limits:
        _check_limit(plan, limit)
    _check_split(plan)


def _check_split(plan: Plan) -> None:
    """Every GPU has an equal part of every weight, and what is said of one GPU is said beside several."""
    for one in plan.weights if plan.gpus > 1 else ():
        given = f"plan for {plan.gpus} GPUs has {one.name} as {one.form} {one.dim} in {one.scheme}"
        check(one.divides(plan.gpus), given, "what they divide into equal parts")
    if (alone := plan.one_gpu) is None:
        return
    counts = (*alone.forms.values(), alone.otherwise, alone.uneven, alone.unsound, *filter(None, alone.latency_ns))
    held = min(counts) >= 0 and len(alone.latency_ns) == len(plan.workloads) and plan.gpus > 1
    check(held, f"plan for {plan.gpus} GPUs states {alone} of one", "counts, and a latency a workload, beside several")


def _check_head(plan: Plan) -> None:
    """Embedding and head are rounded as asked, and what that loses is in the prediction."""
    asked, head = plan.recipe.space.head, plan.measured.head
    stated = head.scheme if head else DEFAULT_SCHEME
    check(asked == stated, f"plan with head {asked} states one in {stated}", "what was asked for")
    lost, part = plan.measured.lost_by_head, plan.prediction.head
    check(lost == part, f"plan predicts a loss of {part:g} by embedding and head", f"{lost:g}, as was measured")


def amounts(
    weights: Sequence[WeightChoice], workloads: Sequence[WorkloadLatency], column: str
) -> tuple[int, int] | None:
    """What these choices take of a cost column, and what the dense weights take; None where either is unknown."""
    if column in COSTS:
        return counted(weights, column)
    for one in workloads:
        if ns_of(one.workload) == column and one.plan_ns is not None and one.dense_ns is not None:
            return one.plan_ns, one.dense_ns
    return None


def _check_limit(plan: Plan, limit: Limit) -> None:
    """Everything that a limit states, counted again."""
    if (found := amounts(plan.weights, plan.workloads, limit.column)) is None:
        raise PlanError(f"plan limits {limit.column!r}", "a cost that it has", REMEDY)
    over = max(0, limit.used - limit.limit)
    check(
        (*found, over) == (limit.used, limit.total, limit.over),
        f"plan states {limit.used} of {limit.total} {limit.column}, limit {limit.limit}, {limit.over} over it",
        f"{found[0]} of {found[1]}, {over} over the limit",
    )


def _check_ranges(plan: Plan) -> None:
    """What is counted is not negative, and what is divided by is not 0."""
    budget, text, unmeasured = plan.budget, plan.measured.calibration, not plan.measured.predicted
    head = plan.measured.head
    beside_head = plan.measured.params + plan.measured.untied - budget.total - (head.params if head else 0)
    counts = {
        "weights of a site": min(len(site.weights) for site in plan.sites),
        "measured.calibration.windows": text.windows + unmeasured,
        "measured.calibration.window_tokens": text.window_tokens + unmeasured,
        **{f"limits.{one.column}": one.limit + 1 for one in plan.limits},
        "measured.params": plan.measured.params - budget.total + 1,
        "measured.rotation.untied": plan.measured.untied + 1,
        "measured.profile.error": int((plan.measured.profile.error or 0) >= 0),
        "healed": int(all(one.possible for one in plan.healed)),
        "measured.head.shapes": beside_head + 1 if head is None or head.possible else 0,
        **{f"{one.workload}.dense_ns": one.dense_ns for one in plan.workloads if one.dense_ns is not None},
        **{f"{one.workload}.plan_ns": one.plan_ns for one in plan.workloads if one.plan_ns is not None},
        **{f"{one.workload}.fused_ns": one.fused_ns for one in plan.workloads if one.fused_ns is not None},
    }
    for name, count in counts.items():
        check(count > 0, f"plan has {name} out of range", "counts that can be")
