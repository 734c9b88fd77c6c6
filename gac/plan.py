"""The plan: one candidate a site, with what it was made from and what it promises."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gac.costs import BYTES, COSTS, KV_NUMBERS, ns_of
from gac.display import Shown
from gac.errors import PlanError
from gac.forms import check_choice, check_choices, form_named
from gac.io import read_record, write_record
from gac.models.weights import Weight
from gac.recipe import Recipe
from gac.schemes import DEFAULT_SCHEME, scheme_named

SCHEMA = 2
_STRICT = {"extra": "forbid", "allow_inf_nan": False}
_EDITED = "Make the plan again; this one was edited."


def is_of_dims(column: str) -> bool:
    """Whether forms and dims alone say what a cost column holds."""
    return column in COSTS


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
    __pydantic_config__ = _STRICT

    @property
    def kept(self) -> float:
        return self.used / self.total


@dataclass(frozen=True)
class Calibration:
    """The text that the statistics were taken from.

    Attributes:
        text: its name, or the path it was read from; how many documents, where they were given in memory.
        windows: how many windows, each of ``window_tokens`` tokens.
        digest: SHA-256 of the token ids.
        loss: the dense model's mean loss on it, nats a token.
        documents: the beginning of the SHA-256 of each document, where they were given in memory. Such a plan is
            applied with the same documents, and says which ones not to evaluate on.
    """

    text: str
    windows: int
    window_tokens: int
    digest: str
    loss: float
    documents: tuple[str, ...] = ()
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class ProfileUsed:
    """The latency table behind the plan; ``note`` says why it, where it was not the local GPU's."""

    gpu: str
    digest: str
    note: str
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class Measured:
    """What plans and frontiers rest on besides the recipe: the model, the text and the table, as they were found.

    Attributes:
        model: its name or path.
        digest: SHA-256 of the targeted weights.
        params: parameters of the whole dense model, embeddings and head included.
        family: its ``model_type``.
        factor: the one fitted number between the summed curvature and the measured loss.
    """

    model: str
    digest: str
    params: int
    family: str
    calibration: Calibration
    profile: ProfileUsed
    factor: float
    __pydantic_config__ = _STRICT


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
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class Prediction:
    """What the plan promises: ``loss`` nats a token more than dense.

    ``dense_perplexity`` and ``perplexity`` are on the calibration text.
    """

    loss: float
    dense_perplexity: float
    perplexity: float
    __pydantic_config__ = _STRICT


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
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class WeightChoice:
    """What one weight becomes."""

    weight: Weight
    form: str
    dim: int
    scheme: str = DEFAULT_SCHEME
    __pydantic_config__ = _STRICT

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def changed(self) -> bool:
        """Whether it is no longer as it was in the dense model."""
        return self.form != "dense" or scheme_named(self.scheme).lossy

    @property
    def params(self) -> int:
        return form_named(self.form).params(self.weight, self.dim)


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
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class SiteChoice:
    """The candidate chosen for a site; ``latency_ns`` has one entry a workload, None where unknown.

    ``shared``: its weights that read the same input run their first GEMMs as one.
    ``alternatives``: where the choice was the exact one, the best candidate with fewer parameters and the best with
    more, at the prices of the certificate (``gac.allocation.alternatives``).
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
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """One candidate for every site, and everything needed to judge and to apply the choice.

    Attributes:
        recipe: what was asked for, with what was left open decided: the refit, the forms of the method.
        limits: what is limited, the parameters first.
        certificate: has one multiplier a limit, in the same order.
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
    __pydantic_config__ = _STRICT

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA:
            raise PlanError(
                f"plan has schema version {self.schema_version}",
                f"version {SCHEMA}",
                "Make the plan again with this version of GAC.",
            )
        _check_counts(self)

    @property
    def budget(self) -> Limit:
        """The limit of the parameters."""
        return self.limits[0]

    def limit(self, column: str) -> Limit | None:
        """The limit of a cost column; None where it is not limited."""
        return next((one for one in self.limits if one.column == column), None)

    @property
    def kept_of_model(self) -> float:
        """Kept fraction of the whole model's parameters."""
        whole = self.measured.params
        return (whole - self.budget.total + self.budget.used) / whole

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
        """How many chosen dims (of weights that are not dense) are multiples of 64, 32, 16, 8, or none."""
        counts = {"64": 0, "32": 0, "16": 0, "8": 0, "unaligned": 0}
        for weight in self.weights:
            if weight.form != "dense":
                step = next((step for step in (64, 32, 16, 8) if weight.dim % step == 0), None)
                counts["unaligned" if step is None else str(step)] += 1
        return counts

    @property
    def aligned_fraction(self) -> float:
        """Fraction of the chosen dims that are multiples of 8 (1.0 when everything stayed dense)."""
        counts = self.alignment
        total = sum(counts.values())
        return 1.0 if total == 0 else 1 - counts["unaligned"] / total

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file is whole or absent.

        Raises:
            PlanError: the path cannot be written.
        """
        write_record(self, path, "plan", PlanError, indent=1)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan back and check its counts again.

        Raises:
            PlanError: the file is unreadable, is not a plan, or contradicts itself.
        """
        return read_record(cls, path, "plan", PlanError)

    def compare(self, other: "Plan") -> "PlanComparison":
        """This plan beside another one for the same model.

        Raises:
            PlanError: the plans are for different weights.
        """
        first, second = self.measured, other.measured
        if first.digest != second.digest:
            raise PlanError(
                f"a plan for {first.model} ({first.digest[:12]}) beside one for {second.model} ({second.digest[:12]})",
                "plans for the same model",
                "Compare plans that were made for the same weights.",
            )
        pairs = zip(self.weights, other.weights, strict=True)
        differences = tuple(WeightDifference(a, b) for a, b in pairs if (a.form, a.dim) != (b.form, b.dim))
        return PlanComparison(self, other, differences)

    def summary(self) -> str:
        """The plan in words, a dozen lines of plain text."""
        return "\n".join(_summary_lines(self))


@dataclass(frozen=True)
class WeightDifference:
    """One weight that two plans choose differently."""

    first: WeightChoice
    second: WeightChoice

    @property
    def params(self) -> int:
        """Parameters that the second plan keeps more than the first."""
        return self.second.params - self.first.params


@dataclass(frozen=True)
class PlanComparison:
    """Two plans for one model, side by side; every pair holds the first plan's figure and the second's.

    Attributes:
        differences: the weights that become something else, in model order.
    """

    first: Plan
    second: Plan
    differences: tuple[WeightDifference, ...]

    @property
    def params(self) -> tuple[int, int]:
        """Parameters of the targeted weights."""
        return self.first.budget.used, self.second.budget.used

    @property
    def loss(self) -> tuple[float, float]:
        """Predicted loss, nats a token more than dense; of one scale only where ``same_prediction``."""
        return self.first.prediction.loss, self.second.prediction.loss

    @property
    def perplexity(self) -> tuple[float, float]:
        """Predicted perplexity on the calibration text."""
        return self.first.prediction.perplexity, self.second.prediction.perplexity

    @property
    def latency(self) -> dict[str, tuple[int, int]]:
        """Predicted ns by workload, for those that both plans know."""
        first, second = (
            {workload.workload: workload.plan_ns for workload in plan.workloads if workload.plan_ns is not None}
            for plan in (self.first, self.second)
        )
        return {workload: (ns, second[workload]) for workload, ns in first.items() if workload in second}

    @property
    def alignment(self) -> tuple[dict[str, int], dict[str, int]]:
        """How many chosen dims are multiples of 64, 32, 16, 8, or none."""
        return self.first.alignment, self.second.alignment

    @property
    def same_prediction(self) -> bool:
        """Whether both losses were measured by the same method, in as many shots, on the same text."""
        first, second = (
            (plan.recipe.measure.method, plan.recipe.measure.shots, plan.measured.calibration)
            for plan in (self.first, self.second)
        )
        return first == second


def _check_counts(plan: Plan) -> None:
    """Count everything again in exact integers; a plan that contradicts itself is refused."""
    for name in ("sites", "limits"):
        if not getattr(plan, name):
            raise PlanError(f"plan has no {name}", "one at least", _EDITED)
    _check_ranges(plan)
    for site in plan.sites:
        for choice in site.weights:
            check_choice(choice.weight, choice.form, choice.dim)
        _check_params(site)
        _check_sides_meet(site)
        for other in site.alternatives:
            weights = [one.weight for one in site.weights]
            check_candidate(other, weights, len(site.latency_ns), f"an alternative of site {site.site}")
    _check_prices(plan)
    asked = {limit.column: limit.asked for limit in plan.limits}
    if list(asked.items()) != list(plan.recipe.fractions.items()):
        raise PlanError(f"plan limits {asked}", f"{plan.recipe.fractions}, as its recipe says", _EDITED)
    for limit in plan.limits:
        _check_limit(plan, limit)


def _check_params(site: SiteChoice) -> None:
    counted = sum(weight.params for weight in site.weights)
    dense = sum(weight.weight.params for weight in site.weights)
    if (counted, dense) != (site.params, site.dense_params):
        raise PlanError(
            f"site {site.site} states {site.params} of {site.dense_params} parameters",
            f"{counted} of {dense}, as its dims say",
            _EDITED,
        )


def counted(weights: Sequence[WeightChoice], column: str) -> tuple[int, int]:
    """What these choices take of a cost that follows from dims alone, and what the dense weights take."""
    cost, dense, plain = COSTS[column], form_named("dense"), scheme_named(DEFAULT_SCHEME)
    used = sum(cost(form_named(one.form), scheme_named(one.scheme), one.weight, one.dim) for one in weights)
    return used, sum(cost(dense, plain, one.weight, dense.full(one.weight)) for one in weights)


def _check_limit(plan: Plan, limit: Limit) -> None:
    """Everything that a limit states, counted again."""
    latency = {ns_of(one.workload): (one.plan_ns, one.dense_ns) for one in plan.workloads}
    if not is_of_dims(limit.column) and limit.column not in latency:
        raise PlanError(f"plan limits {limit.column!r}", "a cost that it has", _EDITED)
    used, total = latency.get(limit.column) or counted(plan.weights, limit.column)
    over = max(0, limit.used - limit.limit)
    if (used, total, over) != (limit.used, limit.total, limit.over):
        raise PlanError(
            f"plan states {limit.used} of {limit.total} {limit.column}, limit {limit.limit}, {limit.over} over it",
            f"{used} of {total}, {over} over the limit",
            _EDITED,
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
    if {forms, schemes, dims} != {len(weights)} or {len(latency), len(interpolated)} != {workloads}:
        raise PlanError(
            f"{what} has {forms} forms, {schemes} schemes, {dims} dims and {len(latency)} latencies, "
            f"{len(interpolated)} counts of interpolated ones",
            f"{len(weights)} of the first three, one a weight, and {workloads} of the others, one a workload",
            _EDITED,
        )
    if any(ns is not None and ns < 1 for ns in latency) or any(count < 0 for count in interpolated):
        given = f"{what} has latencies {latency}, {interpolated} interpolated"
        raise PlanError(given, "positive ns and counts", _EDITED)
    for scheme in candidate.schemes:
        scheme_named(scheme)
    check_choices(weights, candidate.forms, candidate.dims, candidate.params, what)


def _check_ranges(plan: Plan) -> None:
    """What is counted is not negative, and what is divided by is not 0."""
    budget = plan.budget
    counts = {
        "weights of a site": min(len(site.weights) for site in plan.sites),
        "measured.calibration.windows": plan.measured.calibration.windows,
        "measured.calibration.window_tokens": plan.measured.calibration.window_tokens,
        **{f"limits.{one.column}": one.limit + 1 for one in plan.limits},
        "measured.params": plan.measured.params - budget.total + 1,
        **{f"{one.workload}.dense_ns": one.dense_ns for one in plan.workloads if one.dense_ns is not None},
        **{f"{one.workload}.plan_ns": one.plan_ns for one in plan.workloads if one.plan_ns is not None},
    }
    for name, count in counts.items():
        if count < 1:
            raise PlanError(f"plan has {name} out of range", "counts that can be", "Make the plan again.")


def _check_prices(plan: Plan) -> None:
    """Alternatives are weighed at one price a limit."""
    prices = len(plan.certificate.multipliers)
    if any(site.alternatives for site in plan.sites) and prices != len(plan.limits):
        given = f"plan has alternatives and {prices} multipliers"
        raise PlanError(given, f"{len(plan.limits)}, one a limit", _EDITED)


def _check_sides_meet(site: SiteChoice) -> None:
    """Weights that are shorter on sides that meet have one dim."""
    shorter = {(one.form, one.dim) for one in site.weights if form_named(one.form).shortens(one.weight)}
    met = {form_named(one.form).shortens(one.weight) for one in site.weights} - {None}
    if len(shorter) > 1 or (shorter and met != {"out", "in"}):
        raise PlanError(
            f"site {site.site} has {', '.join(f'{form} dim {dim}' for form, dim in sorted(shorter))}",
            "one form and dim for all weights that it shortens together",
            _EDITED,
        )


_REFITTED = {"none": "", "residual": "; refitted layer by layer", "update": "; second factors refitted (SVD-LLM)"}


def _summary_lines(plan: Plan) -> list[str]:
    budget, prediction, proof, measured, asked = (
        plan.budget,
        plan.prediction,
        plan.certificate,
        plan.measured,
        plan.recipe,
    )
    text, forms = measured.calibration, Counter(weight.form for weight in plan.weights)
    aligned = ", ".join(f"{count} x {step}" for step, count in plan.alignment.items() if count)
    return [
        f"GAC plan for {measured.model} ({measured.family}), method {asked.measure.method}, made with GAC "
        f"{plan.gac_version}",
        f"parameters   {budget.used:,} of {budget.total:,} targeted: {budget.kept:.4f} kept, {budget.asked:g} asked,",
        f"             {budget.limit:,} allowed{_over(budget)}; {plan.kept_of_model:.4f} of the whole model",
        *([f"memory       {_taken(memory, 'bytes')}"] if (memory := plan.limit(BYTES)) else []),
        f"forms        {', '.join(f'{count} {form}' for form, count in sorted(forms.items()))}"
        f"{run_as(plan)}{_REFITTED[asked.refit or 'none']}",
        f"alignment    {aligned or 'everything stays dense'}",
        f"loss         +{prediction.loss:.4f} nats a token predicted",
        f"perplexity   {prediction.dense_perplexity:.2f} -> {prediction.perplexity:.2f} predicted on calibration text",
        *(f"latency      {_latency_line(workload)}" for workload in plan.workloads),
        *_cache_line(plan),
        f"profile      {measured.profile.gpu}, {measured.profile.digest[:12]}; {measured.profile.note}",
        f"calibration  {text.windows} x {text.window_tokens} tokens of {text.text}, seed {asked.measure.seed}"
        f"{', two shots' if asked.measure.shots == 2 else ''}",
        f"certificate  {proof.status}: loss {proof.value:.6g}, bound {proof.lower_bound:.6g}, gap {proof.gap:.3g}",
    ]


def run_as(plan: Plan) -> str:
    """What does not run weight by weight as PyTorch does, to follow the forms; nothing where all of it does."""
    return f"{_fusing(plan)}{'; one row in Triton' if plan.recipe.deployment.decode_kernel == 'triton' else ''}"


def _fusing(plan: Plan) -> str:
    fuse = plan.recipe.deployment.fuse
    if fuse != "auto":
        return "; q/k/v and gate/up fused" if fuse else ""
    counts = Counter(site.kind for site in plan.sites if site.shared)
    return f"; fused: {', '.join(f'{count} {kind}' for kind, count in counts.items()) or 'none'}"


def _over(limit: Limit) -> str:
    return f", overshot by {limit.over:,}" if limit.over else ""


def _taken(limit: Limit, unit: str) -> str:
    allowed = f"{limit.limit:,} allowed{_over(limit)}"
    return f"{limit.used:,} of {limit.total:,} {unit}: {limit.kept:.4f} kept, {allowed}"


def _cache_line(plan: Plan) -> list[str]:
    used, total = plan.kv_numbers
    if limit := plan.limit(KV_NUMBERS):
        return [f"KV cache     {_taken(limit, 'numbers a token')}"]
    return [f"KV cache     {used:,} of {total:,} numbers a token: {used / total:.4f} kept"] if total else []


def _latency_line(workload: WorkloadLatency) -> str:
    if workload.dense_ns is None or workload.plan_ns is None:
        missing = f"the profile lacks the shapes of {workload.unknown} weights"
        return f"{workload.workload}: unknown, {missing} (gac profile --model ... measures them)"
    ratio = workload.plan_ns / workload.dense_ns
    counts = f"{workload.measured} measured, {workload.interpolated} interpolated"
    return (
        f"{workload.workload}: {workload.plan_ns / 1e6:.3f} ms of {workload.dense_ns / 1e6:.3f} ms dense "
        f"({ratio:.3f}x; {counts})"
    )
