"""The plan: one candidate a site, with what it was made from and what it promises."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from gac.display import Shown
from gac.errors import PlanError
from gac.forms import check_choice, check_choices, form_named
from gac.forms.planned_sites import Fusing
from gac.io import read_record, write_record
from gac.models.weights import Weight
from gac.schemes import DEFAULT_SCHEME, scheme_named

SCHEMA = 1
_STRICT = {"extra": "forbid", "allow_inf_nan": False}
_EDITED = "Make the plan again; this one was edited."


@dataclass(frozen=True)
class Budget:
    """Parameters of the targeted weights: asked for, allowed, used.

    Attributes:
        asked: kept fraction as the caller gave it.
        limit: ``floor(asked * total)``.
        used: parameters of the chosen candidates.
        total: parameters of the dense targeted weights.
        model: parameters of the whole dense model, embeddings and head included.
        over: by how much a rule that keeps no limit overshot it, ``max(0, used - limit)``; 0 in every plan that
            GAC's own choice made.
    """

    asked: float
    limit: int
    used: int
    total: int
    model: int
    over: int = 0
    __pydantic_config__ = _STRICT

    @property
    def kept(self) -> float:
        return self.used / self.total

    @property
    def kept_of_model(self) -> float:
        return (self.model - self.total + self.used) / self.model


@dataclass(frozen=True)
class KvCache:
    """What the KV cache keeps of a token in all layers together, in numbers (of 2 bytes each in bf16).

    Attributes:
        asked: the allowed fraction of the dense model's; None: not limited.
        limit: ``floor(asked * total)``; None: not limited.
        over: by how much a rule that keeps no limit overshot it; 0 in every plan that GAC's own choice made.
    """

    used: int
    total: int
    asked: float | None = None
    limit: int | None = None
    over: int = 0
    __pydantic_config__ = _STRICT


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
class WorkloadLatency:
    """Predicted latency of the targeted weights, ns, with how the plan's numbers were come by.

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

    ``factor`` is the one fitted number between the summed curvature and the measured loss.
    ``dense_perplexity`` and ``perplexity`` are on the calibration text.
    """

    loss: float
    factor: float
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

    name: str
    form: str
    dim: int
    out_features: int
    in_features: int
    neurons: Literal["out", "in"] | None
    values: Literal["out", "in"] | None = None
    heads: int = 0
    cached: bool = False
    blocks: int = 1
    queries: int = 0
    scheme: str = DEFAULT_SCHEME
    __pydantic_config__ = _STRICT

    @property
    def changed(self) -> bool:
        """Whether it is no longer as it was in the dense model."""
        return self.form != "dense" or scheme_named(self.scheme).lossy

    @classmethod
    def of(cls, weight: Weight, form: str, dim: int, scheme: str = DEFAULT_SCHEME) -> "WeightChoice":
        """This form, dim and scheme for a weight."""
        return cls(
            weight.name,
            form,
            dim,
            weight.out_features,
            weight.in_features,
            weight.neurons,
            weight.values,
            weight.heads,
            weight.cached,
            weight.blocks,
            weight.queries,
            scheme,
        )

    @cached_property
    def weight(self) -> Weight:
        return Weight(
            self.name,
            self.out_features,
            self.in_features,
            self.neurons,
            values=self.values,
            heads=self.heads,
            cached=self.cached,
            blocks=self.blocks,
            queries=self.queries,
        )

    @property
    def params(self) -> int:
        return form_named(self.form).params(self.weight, self.dim)


@dataclass(frozen=True)
class Alternative:
    """A candidate that a site could have had: one form and dim a weight, the rest as for ``SiteChoice``."""

    forms: tuple[str, ...]
    dims: tuple[int, ...]
    params: int
    loss: float
    latency_ns: tuple[int | None, ...]
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
    alternatives: tuple[Alternative, ...] = ()
    __pydantic_config__ = _STRICT


Refit = Literal["none", "residual", "update"]
"""How weights are fitted again, see ``gac.compression.refit``."""

Shots = Literal[1, 2]
"""How often the gradients were taken, see ``gac.sensitivity.second_shot``."""


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """One candidate for every site, and everything needed to judge and to apply the choice.

    ``latency`` is the asked limit by workload, as a fraction of the dense targeted weights' latency. ``fused``: weights
    that read the same input are planned, and run, with their first GEMMs as one (``auto``: where a site is ``shared``).
    ``refit``: how the weights are fitted again to the model that is compressed so far. ``shots``: 2 where the gradients
    are those of a model that was compressed before. ``one_row``: GEMMs of one row are planned, and run, in Triton.
    """

    schema_version: int
    gac_version: str
    model: str
    model_digest: str
    family: str
    method: str
    forms: tuple[str, ...]
    align: bool | int
    seed: int
    calibration: Calibration
    profile: ProfileUsed
    budget: Budget
    latency: dict[str, float]
    workloads: tuple[WorkloadLatency, ...]
    prediction: Prediction
    certificate: Certificate
    sites: tuple[SiteChoice, ...]
    fused: Fusing = False
    refit: Refit = "none"
    kv_cache: KvCache | None = None
    shots: Shots = 1
    one_row: bool = False
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
        if self.model_digest != other.model_digest:
            raise PlanError(
                f"a plan for {self.model} ({self.model_digest[:12]}) beside one for {other.model} "
                f"({other.model_digest[:12]})",
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
        first, second = ((plan.method, plan.shots, plan.calibration) for plan in (self.first, self.second))
        return first == second


def _check_counts(plan: Plan) -> None:
    """Count everything again in exact integers; a plan that contradicts itself is refused."""
    if not plan.sites:
        raise PlanError("plan has no sites", "one at least", _EDITED)
    _check_ranges(plan)
    for site in plan.sites:
        for choice in site.weights:
            check_choice(choice.weight, choice.form, choice.dim)
        _check_params(site)
        _check_sides_meet(site)
        _check_alternatives(site)
    _check_prices(plan)
    if plan.kv_cache is not None:
        _check_cache(plan.weights, plan.kv_cache)
    _check_budget(plan.sites, plan.budget)


def _check_params(site: SiteChoice) -> None:
    counted = sum(weight.params for weight in site.weights)
    dense = sum(weight.weight.params for weight in site.weights)
    if (counted, dense) != (site.params, site.dense_params):
        raise PlanError(
            f"site {site.site} states {site.params} of {site.dense_params} parameters",
            f"{counted} of {dense}, as its dims say",
            _EDITED,
        )


def _check_budget(sites: Sequence[SiteChoice], budget: Budget) -> None:
    used, total = sum(site.params for site in sites), sum(site.dense_params for site in sites)
    over = max(0, used - budget.limit)
    if (used, total, over) != (budget.used, budget.total, budget.over):
        raise PlanError(
            f"plan states {budget.used} of {budget.total} parameters, limit {budget.limit}, {budget.over} over it",
            f"{used} of {total}, {over} over the limit",
            _EDITED,
        )


def _check_alternatives(site: SiteChoice) -> None:
    """They give every weight a form and a dim that it can have, and their parameters are those of their dims."""
    for other in site.alternatives:
        sizes = len(other.forms), len(other.dims), len(other.latency_ns)
        if sizes != (len(site.weights), len(site.weights), len(site.latency_ns)):
            raise PlanError(
                f"an alternative of site {site.site} has {sizes[0]} forms, {sizes[1]} dims and {sizes[2]} latencies",
                f"{len(site.weights)} of the former, one a weight, and {len(site.latency_ns)} latencies",
                _EDITED,
            )
        weights = [one.weight for one in site.weights]
        check_choices(weights, other.forms, other.dims, other.params, f"an alternative of site {site.site}")


def _check_ranges(plan: Plan) -> None:
    """What is counted is not negative, and what is divided by is not 0."""
    budget = plan.budget
    counts = {
        "weights of a site": min(len(site.weights) for site in plan.sites),
        "calibration.windows": plan.calibration.windows,
        "calibration.window_tokens": plan.calibration.window_tokens,
        "budget.limit": budget.limit + 1,
        "budget.model": budget.model - budget.total + 1,
        **{f"{one.workload}.dense_ns": one.dense_ns for one in plan.workloads if one.dense_ns is not None},
        **{f"{one.workload}.plan_ns": one.plan_ns for one in plan.workloads if one.plan_ns is not None},
    }
    for name, count in counts.items():
        if count < 1:
            raise PlanError(f"plan has {name} out of range", "counts that can be", "Make the plan again.")


def _check_prices(plan: Plan) -> None:
    """Alternatives are weighed at one price a limit: parameters, the limited latencies, the KV cache."""
    limits = 1 + len(plan.latency) + (plan.kv_cache is not None and plan.kv_cache.limit is not None)
    if any(site.alternatives for site in plan.sites) and len(plan.certificate.multipliers) != limits:
        raise PlanError(
            f"plan has alternatives and {len(plan.certificate.multipliers)} multipliers",
            f"{limits}, one a limit",
            _EDITED,
        )


def _check_cache(weights: Sequence[WeightChoice], cache: KvCache) -> None:
    kept = sum(form_named(one.form).cached(one.weight, one.dim) for one in weights)
    whole = sum(form_named("dense").cached(one.weight, one.dim) for one in weights)
    over = 0 if cache.limit is None else max(0, kept - cache.limit)
    if (kept, whole, over) != (cache.used, cache.total, cache.over):
        raise PlanError(
            f"plan states {cache.used} of {cache.total} numbers a token in the KV cache, limit {cache.limit}, "
            f"{cache.over} over it",
            f"{kept} of {whole}, {over} over the limit",
            _EDITED,
        )


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
    budget, prediction, proof, text = plan.budget, plan.prediction, plan.certificate, plan.calibration
    forms = Counter(weight.form for weight in plan.weights)
    aligned = ", ".join(f"{count} x {step}" for step, count in plan.alignment.items() if count)
    return [
        f"GAC plan for {plan.model} ({plan.family}), method {plan.method}, made with GAC {plan.gac_version}",
        f"parameters   {budget.used:,} of {budget.total:,} targeted: {budget.kept:.4f} kept, {budget.asked:g} asked,",
        f"             {budget.limit:,} allowed{_over(budget)}; {budget.kept_of_model:.4f} of the whole model",
        f"forms        {', '.join(f'{count} {form}' for form, count in sorted(forms.items()))}"
        f"{run_as(plan)}{_REFITTED[plan.refit]}",
        f"alignment    {aligned or 'everything stays dense'}",
        f"loss         +{prediction.loss:.4f} nats a token predicted",
        f"perplexity   {prediction.dense_perplexity:.2f} -> {prediction.perplexity:.2f} predicted on calibration text",
        *(f"latency      {_latency_line(workload)}" for workload in plan.workloads),
        *([f"KV cache     {_cache_line(plan.kv_cache)}"] if plan.kv_cache and plan.kv_cache.total else []),
        f"profile      {plan.profile.gpu}, {plan.profile.digest[:12]}; {plan.profile.note}",
        f"calibration  {text.windows} x {text.window_tokens} tokens of {text.text}, seed {plan.seed}"
        f"{', two shots' if plan.shots == 2 else ''}",
        f"certificate  {proof.status}: loss {proof.value:.6g}, bound {proof.lower_bound:.6g}, gap {proof.gap:.3g}",
    ]


def run_as(plan: Plan) -> str:
    """What does not run weight by weight as PyTorch does, to follow the forms; nothing where all of it does."""
    return f"{_fusing(plan)}{'; one row in Triton' if plan.one_row else ''}"


def _fusing(plan: Plan) -> str:
    if plan.fused != "auto":
        return "; q/k/v and gate/up fused" if plan.fused else ""
    counts = Counter(site.kind for site in plan.sites if site.shared)
    return f"; fused: {', '.join(f'{count} {kind}' for kind, count in counts.items()) or 'none'}"


def _over(limited: Budget | KvCache) -> str:
    return f", overshot by {limited.over:,}" if limited.over else ""


def _cache_line(cache: KvCache) -> str:
    asked = "" if cache.limit is None else f", {cache.limit:,} allowed{_over(cache)}"
    return f"{cache.used:,} of {cache.total:,} numbers a token: {cache.used / cache.total:.4f} kept{asked}"


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
