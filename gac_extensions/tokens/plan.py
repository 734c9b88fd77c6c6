"""The plan of tokens kept: one budget a layer with its measured loss, the savings, the proof, and the tables."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import fsum
from pathlib import Path
from typing import Any

from gac.core.display import Row, Shown, Table
from gac.core.errors import GacError, PlanError
from gac.core.io import Record
from gac.core.untrusted import read_document
from gac.core.words import duration, megabytes, nats, number_of
from gac.core.workloads import Workload
from gac.models.attentions import Heads
from gac.models.sites import LARGEST_SIZE
from gac.plan.choices import REMEDY
from gac.plan.costs import floored
from gac.plan.evidence import ProfileUsed
from gac.plan.plan import Certificate, Plan, WorkloadLatency
from gac.plan.summary import how_known
from gac.schemes import DEFAULT_SCHEME, scheme_named

SCHEMA = 2


@dataclass(frozen=True)
class LayerTokens:
    """The budget of one layer."""

    layer: int
    kept: int  # tokens of the context that its cache keeps for each key-value head
    priced: tuple[tuple[int, float], ...]  # every measured budget with its loss, nats a token; fewest tokens first

    @property
    def loss(self) -> float:
        return dict(self.priced)[self.kept]


@dataclass(frozen=True, repr=False)
class TokenPlan(Shown, Record):
    """Tokens of a context that every layer keeps, for one press and one model.

    The certificate proves that no choice of the priced budgets within the limits loses less. Its first multiplier is
    the price of a token; those of a nanosecond at each workload of ``latency`` follow.
    """

    schema_version: int
    gac_version: str
    model: str
    digest: str  # of its weights
    family: str  # its architecture in transformers
    press: str  # of kvpress, as ``gac.allocate_tokens`` names it
    options: dict[str, bool | int | float | str]  # of the press, without the compression ratio
    text: str
    text_digest: str  # SHA-256 of its token ids
    windows: int  # number of contexts, each with the tokens that follow
    context: int  # tokens of a context; budgets refer to these
    following: int  # tokens after the context, on which losses were measured
    step: int  # every budget is a multiple of it, unless the layer keeps all
    keep: float  # the requested fraction of all layers' tokens
    limit: int  # ``floor(keep * layers * context)``
    certificate: Certificate
    layers: tuple[LayerTokens, ...]  # those that the press may cut, in order
    heads: Heads
    workloads: tuple[WorkloadLatency, ...] = ()  # attention over the cache of all layers; it counts layers, not weights
    latency: dict[str, float] = field(default_factory=dict)  # the allowed fraction, by workload, where it was limited
    profile: ProfileUsed | None = None
    whole: tuple[int, ...] = ()  # layers of a sliding window, which are not cut; no limit of tokens counts them
    window: int | None = None  # tokens that these cache at most; None if there are none
    _error = PlanError

    def __post_init__(self) -> None:
        self._check_schema(self.schema_version, SCHEMA)
        _check_counts(self)
        for layer in self.layers:
            aligned = layer.kept == self.context or (0 < layer.kept < self.context and layer.kept % self.step == 0)
            if not aligned or layer.kept not in dict(layer.priced):
                expected = f"one of its priced budgets, a multiple of {self.step} or {self.context}"
                raise PlanError(f"layer {layer.layer} keeps {layer.kept} tokens", expected, REMEDY)
        if self.used > self.limit:
            problem = f"a plan that keeps {self.used:,} tokens"
            raise PlanError(problem, f"at most its limit of {self.limit:,}", REMEDY)
        for workload, fraction in self.latency.items():
            timed = next((latency for latency in self.workloads if latency.workload == workload), None)
            planned, dense = (timed.plan_ns, timed.dense_ns) if timed else (None, None)
            if planned is None or dense is None or planned > floored(fraction, dense):
                expected = f"at most {fraction:g} of the dense attention at {workload}"
                raise PlanError(f"a plan that states {timed}", expected, REMEDY)

    def tables(self) -> Sequence[Table | str]:
        columns = [(heading, ">") for heading in ("layer", "tokens", "share", "loss")]
        rows = [
            (f"{layer.layer}", f"{layer.kept:,}", f"{layer.kept / self.context:.3f}", nats(layer.loss))
            for layer in self.layers
        ]
        return Table(columns, rows), "\n".join(f"{name:<10}{value}" for name, value in facts(self))

    def rows(self) -> Sequence[Row]:
        return [
            {"layer": layer.layer, "kept": layer.kept, "share": layer.kept / self.context, "loss": layer.loss}
            for layer in self.layers
        ]

    @property
    def used(self) -> int:
        """Tokens kept in all layers."""
        return sum(layer.kept for layer in self.layers)

    @property
    def total(self) -> int:
        """Tokens of all layers; the limit is a fraction of these."""
        return self.context * len(self.layers)

    @property
    def loss(self) -> float:
        """Predicted loss, nats a token: the sum of the measured losses of each layer's budget."""
        return fsum(layer.loss for layer in self.layers)

    @property
    def contexts(self) -> tuple[int, ...]:
        """The context length of the measurement, then those of the workloads."""
        decoded = (Workload.parse(latency.workload).tokens for latency in self.workloads)
        return tuple(dict.fromkeys((self.context, *decoded)))

    def kept(self, layer: int, tokens: int) -> int:
        """Tokens that a layer keeps of a context of any length; raises as ``kept_of``."""
        if layer in self.whole:
            return min(tokens, self.window or tokens)
        budget = next((planned.kept for planned in self.layers if planned.layer == layer), self.context)
        return kept_of(budget, self.context, tokens, self.step, f", of which layer {layer} keeps none")

    def cache_bytes(self, tokens: int) -> tuple[int, int]:
        """Bytes of the cache of one context, in 16 bits: as planned, and dense; raises as ``kept``."""
        token_bytes = scheme_named(DEFAULT_SCHEME).bytes(1, self.heads.numbers)
        uncut = sum(self.kept(layer, tokens) for layer in self.whole)
        kept = sum(self.kept(layer.layer, tokens) for layer in self.layers)
        return token_bytes * (kept + uncut), token_bytes * (tokens * len(self.layers) + uncut)


def _check_counts(plan: TokenPlan) -> None:
    heads, layers, budgets = plan.heads, plan.layers, list(dict(plan.layers[0].priced)) if plan.layers else []
    numbers = [*(layer.layer for layer in layers), *plan.whole]
    valid = {
        "layers": bool(layers) and sorted(numbers) == [*range(len(numbers))],
        "layers, in order": [layer.layer for layer in layers] == sorted(layer.layer for layer in layers),
        "context, step and windows": min(plan.context, plan.step, plan.windows, plan.following) >= 1,
        "heads": 1 <= heads.cached <= heads.queries and heads.length >= 1 and max(vars(heads).values()) <= LARGEST_SIZE,
        "window": bool(plan.whole) or plan.window is None,
        "window of tokens": plan.window is None or plan.window >= 1,
        "priced budgets, the same in all layers": all(list(dict(layer.priced)) == budgets for layer in layers),
        "multipliers, one a limit": len(plan.certificate.multipliers) == 1 + len(plan.latency),
        "workloads": all(Workload.parse(timed.workload).phase == "decode" for timed in plan.workloads),
        "latencies": all(ns is None or ns > 0 for timed in plan.workloads for ns in (timed.dense_ns, timed.plan_ns)),
    }
    if wrong := next((name for name, holds in valid.items() if not holds), None):
        raise PlanError(f"plan of tokens has {wrong} out of range", "counts that can be", REMEDY)


def kept_of(budget: int, context: int, tokens: int, step: int, where: str = ", of which none is kept") -> int:
    """Tokens kept of a context of ``tokens``, for a budget that was planned for ``context`` tokens.

    ``floor(budget * tokens / context)``, rounded down to a multiple of the step where that is not 0; all of them if the
    budget is the context. Raises GacError if nothing is left of so short a context, which ``where`` describes.
    """
    if budget == context:
        return tokens
    share = budget * tokens // context
    if not share:
        expected = f"{-(-context // budget)} or more, of which it keeps one"
        raise GacError(f"a context of {tokens} tokens{where}", expected, "Run so short a context without the plan.")
    return share // step * step or share


def load_plans(sources: Iterable[Plan | TokenPlan | str | Path]) -> list[Plan] | list[TokenPlan]:
    """Load plans of weights, or plans of tokens, from their paths, or return plans; a PlanError for both kinds."""
    plans: list[Any] = []
    for source in sources:
        document: Any = None
        if isinstance(source, (str, Path)):
            with suppress(GacError):
                document = read_document(Path(source), "plan", "a plan", PlanError)
        of_tokens = isinstance(source, TokenPlan) or (isinstance(document, dict) and "press" in document)
        plans.append((TokenPlan if of_tokens else Plan).opened(source))  # type: ignore[arg-type]
    if len({isinstance(plan, TokenPlan) for plan in plans}) > 1:
        problem = "a plan of weights beside one of another kind, of tokens kept"
        raise PlanError(problem, "plans of one kind", "Compare plans of gac allocate, or plans of gac tokens.")
    return plans


def check_comparable(plans: Mapping[str, TokenPlan]) -> None:
    """Raise PlanError unless the plans are for the same weights and the same context length."""
    (name, first), *others = plans.items()
    for other, plan in others:
        if plan.digest != first.digest:
            problem = f"plan {name} for {first.model} beside {other} for {plan.model}, other weights"
            raise PlanError(problem, "plans for the same model", "Compare plans that were made for the same weights.")
        if plan.context != first.context:
            problem = f"plan {name} of contexts of {first.context:,} tokens beside {other} of {plan.context:,}"
            raise PlanError(problem, "plans for contexts of one length", "Compare plans that were priced alike.")


# --- rows and tables ------------------------------------------------------------------------------------------------


def facts(plan: TokenPlan) -> list[tuple[str, str]]:
    """Pairs of name and value: the request, the tokens kept, their loss, and the savings."""
    proof = plan.certificate
    kept = f"{plan.used:,} of {plan.total:,} tokens ({plan.used / plan.total:.4f})"
    rows = [
        ("press", f"{plan.press}, contexts of {plan.context:,} tokens of {plan.text}"),
        ("kept", f"{kept}, limit {plan.limit:,}"),
        ("loss", f"{nats(plan.loss)} nats a token predicted, {proof.status}, gap {proof.gap:.3g}"),
    ]
    for tokens in plan.contexts:
        used, dense = plan.cache_bytes(tokens)
        share = f"in 16 bits ({used / dense:.4f})"
        rows.append(("memory", f"{megabytes(used)} of {megabytes(dense)} cached of {tokens:,} tokens, {share}"))
    rows += [("latency", _latency(plan, timed)) for timed in plan.workloads]
    if plan.profile:
        rows.append(("profile", f"{plan.profile.gpu}, {plan.profile.digest[:12]}; {plan.profile.note}"))
    if plan.whole:
        size = f"of a window of {plan.window:,} tokens" if plan.window else "that are not cut"
        rows.append(("whole", f"{number_of(len(plan.whole), 'layer')} {size}, which no limit of tokens counts"))
    return rows


def _latency(plan: TokenPlan, timed: WorkloadLatency) -> str:
    limit = f", {plan.latency[timed.workload]:g} allowed" if timed.workload in plan.latency else ""
    if ratio := latency_ratio(timed):
        sizes = f"{duration(timed.plan_ns)} of {duration(timed.dense_ns)} dense"
        return f"{timed.workload}: attention {sizes} ({ratio}{limit}; {how_known(timed)})"
    lacks = f"over what {number_of(timed.unknown, 'layer')} keep" if timed.unknown else "over the whole cache"
    measures = f"gac profile --model ... --tokens --workload {timed.workload}"
    return f"{timed.workload}: unknown, the table lacks attention {lacks} ({measures} measures it)"


def latency_ratio(timed: WorkloadLatency | None) -> str:
    """Latency over that of the dense model; empty if either is unknown."""
    return f"{timed.plan_ns / timed.dense_ns:.3f}x" if timed and timed.dense_ns and timed.plan_ns else ""


def comparison_table(plans: Mapping[str, TokenPlan]) -> Table:
    workloads = dict.fromkeys(timed.workload for plan in plans.values() for timed in plan.workloads)
    rows = []
    for name, plan in plans.items():
        timed = {latency.workload: latency for latency in plan.workloads}
        kept, cached = f"{plan.used / plan.total:.4f}", megabytes(plan.cache_bytes(plan.context)[0])
        figures = name, plan.press, kept, nats(plan.loss), cached, f"{plan.certificate.gap:.3g}"
        rows.append((*figures, *(latency_ratio(timed.get(workload)) or "unknown" for workload in workloads)))
    headings = [(heading, ">") for heading in ("kept", "loss", "cached", "gap", *workloads)]
    notes = "loss: predicted, nats a token; cached: bytes of one context in 16 bits; latency: of attention over dense"
    return Table([("plan", "<"), ("press", "<"), *headings], rows, notes=notes)


def differences_table(plans: Mapping[str, TokenPlan]) -> Table | str:
    """The ten layers of two plans that differ most."""
    (name, first), (other, second) = plans.items()
    both = [(a.layer, a.kept, b.kept) for a, b in zip(first.layers, second.layers, strict=True)]
    differing = sorted((row for row in both if row[1] != row[2]), key=lambda row: -abs(row[1] - row[2]))
    if not differing:
        return f"all {len(both)} layers keep the same"
    cells = [(str(layer), f"{a:,}", f"{b:,}") for layer, a, b in differing[:10]]
    notes = f"{len(differing)} of {len(both)} layers keep another number of tokens"
    return Table([("layer", ">"), (name, ">"), (other, ">")], cells, notes=notes)
