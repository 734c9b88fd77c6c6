"""The plan: one candidate a site, with what it was made from and what it promises."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Literal

from gac.arguments import checked
from gac.costs import BYTES, COSTS, KV_NUMBERS, ns_of
from gac.display import Shown
from gac.errors import PlanError
from gac.forms import check_choice, form_named
from gac.io import Record
from gac.models.basis import Rotation
from gac.models.sites import Site, Weight
from gac.plan_summary import summary
from gac.recipe import Recipe
from gac.schemes import DEFAULT_SCHEME, scheme_named

SCHEMA = 2
_REMEDY = "Make it again; this one was edited."
_LARGEST = 709.0  # e to this power is about 8e307, near the largest float64


@dataclass(frozen=True)
class Limit:
    """What all choices together may take of one resource, and what they take.

    Attributes:
        column: the cost: ``params`` and ``bytes`` of the targeted weights, ``kv_numbers`` (numbers that the KV cache
            keeps of a token in all layers, 2 bytes each in bf16) or ``ns:WORKLOAD``.
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
class CalibrationPart:
    """One of several texts of a calibration: its name or path, and how many of the windows are its."""

    text: str
    windows: int


@dataclass(frozen=True)
class Calibration:
    """The text that the statistics were taken from.

    Attributes:
        text: its name, or the path it was read from; how many documents, where they were given in memory; where there
            are several texts, each with its windows.
        windows: how many windows, each of ``window_tokens`` tokens; 0 of ``UNMEASURED``.
        digest: SHA-256 of the token ids.
        loss: the dense model's mean loss on it, nats a token.
        documents: the beginning of the SHA-256 of each document, where they were given in memory. Such a plan is
            applied with the same documents, and says which ones not to evaluate on.
        bos: every window begins with BOS, in the place of one token of text; plans that do not say so have none.
        parts: where there are several texts, each of them; ``windows`` are those of all, interleaved.
    """

    text: str
    windows: int
    window_tokens: int
    digest: str
    loss: float
    documents: tuple[str, ...] = ()
    bos: bool = False
    parts: tuple[CalibrationPart, ...] = ()

    @property
    def texts(self) -> tuple[CalibrationPart, ...]:
        """Every text with its windows, also where there is one."""
        return self.parts or (CalibrationPart(self.text, self.windows),)

    def __str__(self) -> str:
        """``64 x 1024 tokens of wiki-sample, no BOS``."""
        head = "BOS at the head of every window" if self.bos else "no BOS"
        return f"{self.windows} x {self.window_tokens} tokens of {self.text}, {head}"


UNMEASURED = Calibration("none", 0, 0, "", 0.0)
"""Of a plan for which nothing was measured: it states what others pruned, and predicts nothing."""


@dataclass(frozen=True)
class ProfileUsed:
    """The latency table behind the plan; ``note`` says why it, where it was not the local GPU's."""

    gpu: str
    digest: str
    note: str


@dataclass(frozen=True)
class Measured:
    """What plans and frontiers rest on besides the recipe: the model, the text and the table, as they were found.

    Attributes:
        model: its name or path.
        digest: SHA-256 of the targeted weights.
        params: parameters of the whole dense model, embeddings and head included.
        family: its ``model_type``.
        factor: the one fitted number between the summed curvature and the measured loss.
        error: how far from it the measured loss is expected, as a share of the predicted one; None where the method's
            predictions were never compared with measurements.
        rotation: what was rotated before anything was measured; None where nothing was.
    """

    model: str
    digest: str
    params: int
    family: str
    calibration: Calibration
    profile: ProfileUsed
    factor: float
    error: float | None = None
    rotation: Rotation | None = None

    @property
    def predicted(self) -> bool:
        """Whether the loss of the plan was predicted."""
        return self.calibration != UNMEASURED

    def perplexity(self, loss: float) -> float:
        """On the calibration text, for a predicted loss; the smallest budgets of large models lose hundreds of nats."""
        return exp(min(self.calibration.loss + loss, _LARGEST))

    def give_or_take(self) -> str:
        """``, give or take 15 %``, the error of a predicted loss; nothing where it is not known."""
        return "" if self.error is None else f", give or take {100 * self.error:.0f} %"


@dataclass(frozen=True)
class WorkloadLatency:
    """Predicted latency of the targeted weights, ns, with how each of the plan's numbers was obtained.

    ``dense_ns`` and ``plan_ns`` are None where the profile lacks a shape (``unknown`` counts the weights).
    """

    workload: str
    dense_ns: int | None
    plan_ns: int | None
    measured: int
    interpolated: int
    unknown: int


@dataclass(frozen=True)
class Prediction:
    """What the plan promises: ``loss`` nats a token more than dense.

    ``dense_perplexity`` and ``perplexity`` are on the calibration text. ``together`` is the part of the loss beyond the
    sum over the sites, which was measured of pairs of choices.
    """

    loss: float
    dense_perplexity: float
    perplexity: float
    together: float = 0.0

    @property
    def summed(self) -> float:
        """What the choices lose by themselves: what was minimised, or limited where latency was."""
        return self.loss - self.together


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
class WeightChoice:
    """What one weight becomes."""

    weight: Weight
    form: str
    dim: int
    scheme: str = DEFAULT_SCHEME

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def becomes(self) -> tuple[str, int, str]:
        """Form, dim and scheme."""
        return self.form, self.dim, self.scheme

    @property
    def changed(self) -> bool:
        """Whether it is no longer as it was in the dense model."""
        return self.form != "dense" or scheme_named(self.scheme).lossy

    @property
    def params(self) -> int:
        return form_named(self.form).params(self.weight, self.dim)

    @property
    def bytes(self) -> int:
        """Scales and zero points among them."""
        return counted([self], BYTES)[0]

    @property
    def dense_bytes(self) -> int:
        """Of the dense weight in 16 bits."""
        return counted([self], BYTES)[1]

    @property
    def length(self) -> int:
        """What alignment is judged by: the dim, or the features of as many heads or blocks."""
        form = form_named(self.form)
        return form.size(self.weight, self.dim) if form.pieces else self.dim

    @property
    def aligned(self) -> bool:
        """Whether it is dense, or that length a multiple of 8."""
        return self.form == "dense" or self.length % 8 == 0


@dataclass(frozen=True)
class Candidate:
    """What a site may become: a form, a scheme and a dim a weight; a latency (None: unknown) and a count a workload.

    ``interpolated``: how many of its weights' latencies were interpolated.
    ``shared``: its weights that read the same input run their first GEMMs as one.
    """

    forms: tuple[str, ...]
    schemes: tuple[str, ...]
    dims: tuple[int, ...]
    params: int
    loss: float
    latency_ns: tuple[int | None, ...]
    interpolated: tuple[int, ...]
    shared: bool = False

    def choices(self, weights: Sequence[Weight]) -> tuple[WeightChoice, ...]:
        """What each of the site's weights becomes."""
        return tuple(WeightChoice(*one) for one in zip(weights, self.forms, self.dims, self.schemes, strict=True))


@dataclass(frozen=True)
class SiteChoice:
    """The candidate chosen for a site; ``latency_ns`` has one entry a workload, None where unknown.

    ``shared``: its weights that read the same input run their first GEMMs as one.
    ``alternatives``: where the choice was the exact one, the best candidate with fewer parameters and the best with
    more (with fewer and more bytes, where these are limited), at the prices of the certificate.
    """

    site: str
    layer: int
    kind: str
    weights: tuple[WeightChoice, ...]
    params: int
    dense_params: int
    loss: float
    latency_ns: tuple[int | None, ...]
    shared: bool = False
    alternatives: tuple[Candidate, ...] = ()

    @classmethod
    def of(cls, site: Site, chosen: Candidate, alternatives: tuple[Candidate, ...] = ()) -> "SiteChoice":
        """One of a site's candidates as its choice."""
        weights, latency = chosen.choices(site.weights), chosen.latency_ns
        sizes = chosen.params, site.params
        return cls(site.name, site.layer, site.kind, weights, *sizes, chosen.loss, latency, chosen.shared, alternatives)


@dataclass(frozen=True, repr=False)
class Plan(Shown, Record):
    """One candidate for every site, and everything needed to judge and to apply the choice.

    Attributes:
        recipe: what was asked for, with what was left open decided: the refit, the forms of the method.
        limits: what is limited, the parameters first.
        certificate: of the least loss; it has one multiplier a limit, in the same order.
        speed: what was given for speed; None where the plan is the choice of least loss.
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
    _error = PlanError

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
        whole, rotation = self.measured.params, self.measured.rotation
        untied = rotation.untied if rotation else 0
        return (whole - self.budget.total + self.budget.used + untied) / whole

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of the targeted weights, scales and zero points among them: as planned, and dense in 16 bits."""
        return counted(self.weights, BYTES)

    @property
    def model_bytes(self) -> tuple[int, int]:
        """Bytes of the whole model, tied weights once: as planned, and dense. What is not targeted is in 16 bits."""
        others = scheme_named(DEFAULT_SCHEME).bytes(1, self.measured.params - self.budget.total)
        used, total = self.bytes
        return others + used, others + total

    @property
    def bits(self) -> tuple[float, float]:
        """Bits for each dense parameter, scales and zero points among them: of the targeted weights, of the model."""
        return 8 * self.bytes[0] / self.budget.total, 8 * self.model_bytes[0] / self.measured.params

    @property
    def kv_numbers(self) -> tuple[int, int]:
        """Numbers that the KV cache keeps of a token: of this plan, and of the dense model."""
        return counted(self.weights, KV_NUMBERS)

    @property
    def weights(self) -> tuple[WeightChoice, ...]:
        """Every weight's choice, in model order."""
        return tuple(weight for site in self.sites for weight in site.weights)

    @property
    def alignment(self) -> dict[str, int]:
        """How many chosen dims (of weights that are not dense) are multiples of 64, 32, 16, 8, or none.

        Of heads and blocks their features count.
        """
        steps, dims = ("64", "32", "16", "8"), [weight.length for weight in self.weights if weight.form != "dense"]
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
        first, second = (
            (plan.recipe.measure.method, plan.recipe.measure.shots, plan.measured.calibration)
            for plan in (self.first, self.second)
        )
        return first == second


def check(holds: bool, given: str, expected: str) -> None:
    """Refuse a plan or a frontier that contradicts itself.

    Raises:
        PlanError: of what is given and expected, where it does not hold.
    """
    if not holds:
        raise PlanError(given, expected, _REMEDY)


def _check_counts(plan: Plan) -> None:
    """Count everything again in exact integers; a plan that contradicts itself is refused."""
    for name in ("sites", "limits"):
        check(bool(getattr(plan, name)), f"plan has no {name}", "one at least")
    _check_ranges(plan)
    for site in plan.sites:
        _check_site(site)
    prices, limits, recipe = len(plan.certificate.multipliers), len(plan.limits), plan.recipe.fractions
    priced = prices == limits or not any(site.alternatives for site in plan.sites)
    check(priced, f"plan has alternatives and {prices} multipliers", f"{limits}, one a limit")
    if plan.speed is not None:
        shape = len(plan.speed.latency_ns), len(plan.speed.certificate.multipliers)
        given = f"plan has speed with {shape[0]} latencies and {shape[1]} multipliers"
        check(shape == (len(plan.workloads), limits + 1), given, f"{len(plan.workloads)} and {limits + 1}")
    rotated, rotation = plan.recipe.space.rotate, plan.measured.rotation
    check(rotated == (rotation is not None), f"plan with rotate {rotated} states {rotation}", "what was rotated")
    asked = {limit.column: limit.asked for limit in plan.limits}
    as_asked = list(asked.items()) == list(recipe.items())
    check(as_asked, f"plan limits {asked}", f"{recipe}, as its recipe says")
    for limit in plan.limits:
        _check_limit(plan, limit)


def _check_site(site: SiteChoice) -> None:
    weights = [one.weight for one in site.weights]
    _check_choices(site.weights, site.params, f"site {site.site}")
    dense = sum(weight.params for weight in weights)
    check(dense == site.dense_params, f"site {site.site} states {site.dense_params} dense parameters", f"{dense}")
    for other in site.alternatives:
        check_candidate(other, weights, len(site.latency_ns), f"an alternative of site {site.site}")


def counted(weights: Sequence[WeightChoice], column: str) -> tuple[int, int]:
    """What these choices take of a cost that follows from dims alone, and what the dense weights take."""
    cost, dense, plain = COSTS[column], form_named("dense"), scheme_named(DEFAULT_SCHEME)
    used = sum(cost(form_named(one.form), scheme_named(one.scheme), one.weight, one.dim) for one in weights)
    return used, sum(cost(dense, plain, one.weight, dense.full(one.weight)) for one in weights)


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
        raise PlanError(f"plan limits {limit.column!r}", "a cost that it has", _REMEDY)
    over = max(0, limit.used - limit.limit)
    check(
        (*found, over) == (limit.used, limit.total, limit.over),
        f"plan states {limit.used} of {limit.total} {limit.column}, limit {limit.limit}, {limit.over} over it",
        f"{found[0]} of {found[1]}, {over} over the limit",
    )


def check_candidate(candidate: Candidate, weights: Sequence[Weight], workloads: int, what: str) -> None:
    """Refuse a candidate that these weights cannot have, or whose counts are not those of its dims.

    Args:
        workloads: how many latencies it has.
        what: how an error names it: ``an option of site ...``.

    Raises:
        PlanError: naming what does not fit.
    """
    forms, schemes, dims = len(candidate.forms), len(candidate.schemes), len(candidate.dims)
    latency, interpolated = candidate.latency_ns, candidate.interpolated
    check(
        {forms, schemes, dims} == {len(weights)} and {len(latency), len(interpolated)} == {workloads},
        f"{what} has {forms} forms, {schemes} schemes, {dims} dims and {len(latency)} latencies, "
        f"{len(interpolated)} counts of interpolated ones",
        f"{len(weights)} of the first three, one a weight, and {workloads} of the others, one a workload",
    )
    positive = all(ns is None or ns >= 0 for ns in latency) and all(count >= 0 for count in interpolated)
    check(positive, f"{what} has latencies {latency}, {interpolated} interpolated", "positive ns and counts")
    _check_choices(candidate.choices(weights), candidate.params, what)


def _check_choices(choices: Sequence[WeightChoice], params: int, what: str) -> None:
    for one in choices:
        check_choice(one.weight, one.form, one.dim)
        scheme = scheme_named(one.scheme)
        runs = scheme.needs is None or all(map(scheme.runs, form_named(one.form).gemms(one.weight, one.dim, 1)))
        check(runs, f"{what} has {one.name} as {one.form} {one.dim} in {scheme.name}", scheme.needs or "")
    _check_meeting(choices, what)
    counted = sum(one.params for one in choices)
    check(counted == params, f"{what} states {params} parameters", f"{counted}, as its dims say")


def _check_meeting(choices: Sequence[WeightChoice], what: str) -> None:
    """Where weights meet on sides that a form shortens, they are all as long as it says there."""
    lengths = [form_named(one.form).shortening(one.dim) for one in choices]
    for form, dim in lengths:
        meeting = [at for at, one in enumerate(choices) if form.shortens(one.weight)]
        sides = {form.shortens(choices[at].weight) for at in meeting}
        agreed = sides == {"out", "in"} and all(lengths[at] == (form, dim) for at in meeting)
        check(
            agreed or not any(lengths[at] == (form, dim) for at in meeting),
            f"{what} has {', '.join(dict.fromkeys(f'{choices[at].form} dim {choices[at].dim}' for at in meeting))}",
            "one form and dim for all weights that it shortens together",
        )


def _check_ranges(plan: Plan) -> None:
    """What is counted is not negative, and what is divided by is not 0."""
    budget, text, unmeasured = plan.budget, plan.measured.calibration, not plan.measured.predicted
    counts = {
        "weights of a site": min(len(site.weights) for site in plan.sites),
        "measured.calibration.windows": text.windows + unmeasured,
        "measured.calibration.window_tokens": text.window_tokens + unmeasured,
        **{f"limits.{one.column}": one.limit + 1 for one in plan.limits},
        "measured.params": plan.measured.params - budget.total + 1,
        "measured.rotation.untied": plan.measured.rotation.untied + 1 if plan.measured.rotation else 1,
        **{f"{one.workload}.dense_ns": one.dense_ns for one in plan.workloads if one.dense_ns is not None},
        **{f"{one.workload}.plan_ns": one.plan_ns for one in plan.workloads if one.plan_ns is not None},
    }
    for name, count in counts.items():
        check(count > 0, f"plan has {name} out of range", "counts that can be")
