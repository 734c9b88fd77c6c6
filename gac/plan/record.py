"""The record of a plan: one candidate a site, what it was made from and what it promises, with what follows from it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gac.core.errors import PlanError
from gac.core.io import Record
from gac.forms import form_named
from gac.models.sites import Weight
from gac.plan.choices import SiteChoice, WeightChoice, counted
from gac.plan.costs import BYTES, COSTS, KV_NUMBERS, ns_of
from gac.plan.evidence import Healed, Measured
from gac.plan.recipe import Recipe
from gac.schemes import DEFAULT_SCHEME, scheme_named


@dataclass(frozen=True)
class Limit:
    """The limit of one resource over all choices, and the amount that they use.

    Attributes:
        column: a cost of ``gac.plan.costs.COSTS``, or ``ns:WORKLOAD``.
        asked: the allowed fraction of the dense model's amount, which is ``total``; ``limit = floor(asked * total)``.
        over: ``max(0, used - limit)``; above 0 only by a rule that keeps no limit.
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
    """Predicted latency of the targeted weights, with the number of weights by the source of their latency.

    Latencies are None where unknown. The dense model is as engines run it: weights of one input share a GEMM.
    Both have ``rest_ns``: what the engine takes for a step beside the targeted weights' GEMMs; 0 where it is unknown.
    ``fused_ns`` is a field of stored plans, so that those of earlier versions open.
    """

    workload: str
    dense_ns: int | None
    plan_ns: int | None
    measured: int
    interpolated: int
    unknown: int
    modelled: int = 0
    fused_ns: int | None = None
    rest_ns: int = 0


@dataclass(frozen=True)
class TextPrediction:
    """The predicted loss on one of several calibration texts, nats a token more than dense, and perplexities on it."""

    text: str
    loss: float
    dense_perplexity: float
    perplexity: float


@dataclass(frozen=True)
class Prediction:
    """The predicted loss, nats a token more than dense, and perplexities on the calibration text.

    Attributes:
        together: the part of the loss beyond the sum over the sites: measured of pairs of choices, of all latents
            together, and of some choices on text.
        head: the part of quantised embedding and head, which no choice changes.
        by_text: the same on each of several calibration texts, and then on a text that is not calibrated on, where it
            was asked for; see ``gac.compression.by_text``.
    """

    loss: float
    dense_perplexity: float
    perplexity: float
    together: float = 0.0
    head: float = 0.0
    by_text: tuple[TextPrediction, ...] = ()

    @property
    def summed(self) -> float:
        """The sum over the sites, which was minimised, or limited where latency was minimised."""
        return self.loss - self.together - self.head


@dataclass(frozen=True)
class Certificate:
    """The solver's proof over its candidates and their predicted losses, in the units of the objective (nats a token).

    Attributes:
        status: ``optimal`` when ``gap = value - lower_bound`` is 0, ``feasible`` otherwise.
        value: the loss of the best choice found. It is the plan's sum of losses where the plan has no ``speed``.
        lower_bound: no choice within the limits loses less, up to half a unit of rounding. ``gac.knapsack`` defines the
            unit.
        multipliers: the Lagrange multiplier of each limit, in the order of ``Plan.limits``, in loss per unit of its
            cost. They give the bound that excludes most candidates; a search of the others closes the gap.
        method: the steps of the proof and the work they took, or the rule that chose; after a second solution by HiGHS,
            its verdict too.
    """

    status: Literal["optimal", "feasible"]
    value: float
    lower_bound: float
    gap: float
    multipliers: tuple[float, ...]
    method: str

    @property
    def is_valid(self) -> bool:
        agree = self.gap == self.value - self.lower_bound and self.gap >= 0 and min(self.multipliers, default=0) >= 0
        return agree and (self.gap == 0 or self.status == "feasible")


@dataclass(frozen=True)
class Speed:
    """The choice of least loss, where the plan is the fastest that loses at most the recipe's ``slack`` more.

    Attributes:
        loss, latency_ns: of that choice; the plan's certificate proves its loss.
        certificate: proves that no choice within the limits and the slack is faster. Its value is the sum of the
            latencies, each as a fraction of the dense model's. It has one multiplier for each limit; the last one is of
            the limit on the loss, per nat.
    """

    loss: float
    latency_ns: tuple[int | None, ...]
    certificate: Certificate


@dataclass(frozen=True)
class AnyLatency:
    """The choice of least loss without limits of latency, where some of a plan's bind.

    Attributes:
        loss: the sum over the sites, nats a token.
        latency_ns: one a workload; None where unknown.
    """

    loss: float
    latency_ns: tuple[int | None, ...]


@dataclass(frozen=True)
class SingleGpuComparison:
    """Differences of a plan for several GPUs from the plan for one with the same curves and limits.

    Attributes:
        loss: predicted for one GPU, nats a token.
        forms: dense parameters of the weights that take each form there.
        otherwise: the number of weights with another choice there.
        uneven, unsound: the number of weights whose dims there split into unequal parts, or into slow ones.
        latency_ns: of that plan on the GPUs, one a workload, with uneven dims padded; None where unknown.
    """

    loss: float
    forms: dict[str, int]
    otherwise: int
    uneven: int
    unsound: int
    latency_ns: tuple[int | None, ...]


@dataclass(frozen=True, repr=False)
class PlanRecord(Record):
    """The fields of a plan, and the amounts that follow from them; ``gac.plan.plan.Plan`` checks them.

    Attributes:
        recipe: the request, with its open fields resolved: the refit, the forms of the method.
        limits: the parameters first.
        certificate: of the least loss; it has one multiplier a limit, in the same order.
        speed: None where the plan is the choice of least loss.
        any_latency: None where no limit of latency binds.
        one_gpu: of a plan for several GPUs; None where no choice for one GPU keeps the limits, or none was made.
        healed: trainings of the model that carries the plan, in order.
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
    one_gpu: SingleGpuComparison | None = None
    healed: tuple[Healed, ...] = ()
    any_latency: AnyLatency | None = None
    _error = PlanError

    @property
    def budget(self) -> Limit:
        return self.limits[0]

    def limit(self, column: str) -> Limit | None:
        return next((limit for limit in self.limits if limit.column == column), None)

    @property
    def prices(self) -> tuple[float, ...]:
        """The price of a unit of each limit, in nats a token; of latency also the gain of the objective.

        Raises:
            AssertionError: loss did not limit the fastest choice, so that nothing has a price in it.
        """
        if self.speed is None:
            return self.certificate.multipliers
        *paid, nat = self.speed.certificate.multipliers
        assert nat > 0, "no price in nats"
        dense = {ns_of(timed.workload): timed.dense_ns for timed in self.workloads if timed.dense_ns}
        gains = [1 / dense[limit.column] if limit.column in dense else 0.0 for limit in self.limits]
        return tuple((price + gain) / nat for price, gain in zip(paid, gains, strict=True))

    @property
    def size(self) -> Limit:
        """The limit that decides which of two choices is smaller: of bytes, else the budget."""
        return self.limit(BYTES) or self.budget

    @property
    def kept_of_model(self) -> float:
        """Kept fraction of the whole model's parameters; a head that rotation has untied counts among those kept."""
        dense = self.measured.params
        return (dense - self.budget.total + self.budget.used + self.measured.untied) / dense

    def amount(self, column: str) -> tuple[int, int]:
        return counted(self.weights, column)

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of the targeted weights, scales and zero points among them: as planned, and dense in 16 bits."""
        return self.amount(BYTES)

    @property
    def model_bytes(self) -> tuple[int, int]:
        """Bytes of the whole model, tied weights once: as planned, and dense.

        Weights that are not targeted have 16 bits, except a quantised embedding and head. A head that rotation has
        untied counts in the plan's, and not in the dense model's.
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
        return self.amount(KV_NUMBERS)

    @property
    def gpus(self) -> int:
        return self.recipe.deployment.tensor_parallel

    @property
    def on_each_gpu(self) -> dict[str, int]:
        """The amounts on one of the GPUs, by cost column.

        Scales of rows whose columns are divided are on every GPU: bytes may be a little more than an equal part.
        """
        chosen = [(form_named(each.form), scheme_named(each.scheme), each.weight, each.dim) for each in self.weights]
        return {name: sum(cost.on_gpu(*choice, self.gpus) for choice in chosen) for name, cost in COSTS.items()}

    @property
    def weights(self) -> tuple[WeightChoice, ...]:
        return tuple(weight for site in self.sites for weight in site.weights)

    @property
    def documents(self) -> tuple[str, ...]:
        """The digests of the documents, given in memory, that it was calibrated or its model was healed on."""
        return sum((healed.documents for healed in self.healed), self.measured.calibration.documents)

    @property
    def experts(self) -> list[list[WeightChoice]]:
        """The choices of routed experts, in lists of one shape each."""
        by_shape = defaultdict[Weight, list[WeightChoice]](list)
        for choice in self.weights:
            if choice.weight.experts:
                by_shape[replace(choice.weight, name="")].append(choice)
        return [*by_shape.values()]

    @property
    def alignment(self) -> dict[str, int]:
        """The number of chosen dims (of weights that are not dense) that are multiples of 64, 32, 16, 8, or none.

        Of heads and blocks their features count; of split weights the part on each GPU.
        """
        counts = dict.fromkeys(("64", "32", "16", "8", "unaligned"), 0)
        for length in (choice.length_on(self.gpus) for choice in self.weights if choice.form != "dense"):
            counts[next((step for step in ("64", "32", "16", "8") if length % int(step) == 0), "unaligned")] += 1
        return counts

    @property
    def aligned_fraction(self) -> float:
        """Fraction of the chosen dims that are multiples of 8 (1.0 when everything stayed dense)."""
        counts = self.alignment
        return 1 - counts["unaligned"] / (sum(counts.values()) or 1)


def amounts(
    weights: Sequence[WeightChoice], workloads: Sequence[WorkloadLatency], column: str
) -> tuple[int, int] | None:
    """The amounts of a cost column of these choices and of the dense weights; None where either is unknown."""
    if column in COSTS:
        return counted(weights, column)
    for timed in workloads:
        if ns_of(timed.workload) == column and timed.plan_ns is not None and timed.dense_ns is not None:
            return timed.plan_ns, timed.dense_ns
    return None
