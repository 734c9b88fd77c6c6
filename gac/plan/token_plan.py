"""The plan of tokens kept: one budget a layer, what each share was measured to lose, what it saves, and the proof."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import fsum
from pathlib import Path

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
    """The budget of one layer.

    Attributes:
        layer: its number.
        kept: of the context's tokens, how many its cache keeps for each key-value head.
        priced: how many tokens could be kept, and what each loses by itself, nats a token; fewest first.
    """

    layer: int
    kept: int
    priced: tuple[tuple[int, float], ...]

    @property
    def loss(self) -> float:
        """What its budget was measured to lose."""
        return dict(self.priced)[self.kept]


@dataclass(frozen=True, repr=False)
class TokenPlan(Shown, Record):
    """How many tokens of a context every layer keeps, for one press and one model.

    Attributes:
        model: the name it goes by.
        digest: of its weights.
        family: its architecture in transformers.
        press: the press of kvpress, as ``gac.allocate_tokens`` names it.
        options: its parameters, the compression ratio apart.
        text: that was calibrated on, by name.
        text_digest: SHA-256 of the token ids.
        windows: how many contexts, each with the tokens that follow.
        context: tokens of a context; budgets are of these.
        following: tokens after the context, on which losses were measured.
        step: what every budget is a multiple of, but that of a layer that keeps all.
        keep: the fraction of all layers' tokens that was asked for.
        limit: ``floor(keep * layers * context)``.
        certificate: that no choice of the priced budgets within the limits loses less; its first multiplier is that of
            a token, then follow those of a nanosecond at each workload of ``latency``.
        layers: those that the press may cut, in order.
        heads: of every attention.
        workloads: of attention over the cache, in all layers: dense, and with what they keep. Layers are counted, where
            those of a plan of weights count weights.
        latency: the allowed fraction of that, by workload, where it was limited.
        profile: whose latencies these are; None where there was no table.
        whole: layers that the press may not cut, since their attention is of a sliding window; no limit of tokens
            counts them.
        window: how many tokens these cache at most; None where there are none.
    """

    schema_version: int
    gac_version: str
    model: str
    digest: str
    family: str
    press: str
    options: dict[str, bool | int | float | str]
    text: str
    text_digest: str
    windows: int
    context: int
    following: int
    step: int
    keep: float
    limit: int
    certificate: Certificate
    layers: tuple[LayerTokens, ...]
    heads: Heads
    workloads: tuple[WorkloadLatency, ...] = ()
    latency: dict[str, float] = field(default_factory=dict)
    profile: ProfileUsed | None = None
    whole: tuple[int, ...] = ()
    window: int | None = None
    _error = PlanError
    _taken_for = "recipe", "a plan of weights", "Apply it with gac compress; gac tokens makes plans of tokens kept."

    def __post_init__(self) -> None:
        self._check_schema(self.schema_version, SCHEMA)
        _check_counts(self)
        for one in self.layers:
            aligned = one.kept == self.context or (0 < one.kept < self.context and one.kept % self.step == 0)
            if not aligned or one.kept not in dict(one.priced):
                expected = f"one of its priced budgets, a multiple of {self.step} or {self.context}"
                raise PlanError(f"layer {one.layer} keeps {one.kept} tokens", expected, REMEDY)
        if self.used > self.limit:
            given = f"a plan that keeps {self.used:,} tokens"
            raise PlanError(given, f"at most its limit of {self.limit:,}", REMEDY)
        for workload, fraction in self.latency.items():
            timed = next((one for one in self.workloads if one.workload == workload), None)
            if timed is None or not _within(timed, fraction):
                expected = f"at most {fraction:g} of the dense attention at {workload}"
                raise PlanError(f"a plan that states {timed}", expected, REMEDY)

    def tables(self) -> Sequence[Table | str]:
        columns = [("layer", ">"), ("tokens", ">"), ("share", ">"), ("loss", ">")]
        rows = [
            (str(layer.layer), f"{layer.kept:,}", f"{layer.kept / self.context:.3f}", nats(layer.loss))
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
        """Tokens that all layers keep together."""
        return sum(one.kept for one in self.layers)

    @property
    def total(self) -> int:
        """Tokens of all layers, of which the limit is a fraction."""
        return self.context * len(self.layers)

    @property
    def loss(self) -> float:
        """Predicted: the sum of what each layer's budget was measured to lose, nats a token."""
        return fsum(one.loss for one in self.layers)

    @property
    def contexts(self) -> tuple[int, ...]:
        """The lengths that it speaks of: the context that was priced, then those of its workloads."""
        asked = (Workload.parse(one.workload).tokens for one in self.workloads)
        return tuple(dict.fromkeys((self.context, *asked)))

    def kept(self, layer: int, tokens: int) -> int:
        """How many tokens a layer keeps of a context of any length, see ``kept_of``.

        Raises:
            GacError: none is left of so short a context.
        """
        if layer in self.whole:
            return min(tokens, self.window or tokens)
        own = next((one.kept for one in self.layers if one.layer == layer), self.context)
        return kept_of(own, self.context, tokens, self.step, f", of which layer {layer} keeps none")

    def cache_bytes(self, tokens: int) -> tuple[int, int]:
        """Bytes of the cache of one context of so many tokens, in 16 bits: as planned, and dense.

        Raises:
            GacError: as ``kept``.
        """
        numbers = scheme_named(DEFAULT_SCHEME).bytes(1, self.heads.numbers)
        whole = sum(self.kept(layer, tokens) for layer in self.whole)
        kept = sum(self.kept(one.layer, tokens) for one in self.layers)
        return numbers * (kept + whole), numbers * (tokens * len(self.layers) + whole)


def _check_counts(plan: TokenPlan) -> None:
    """What is counted can be, and what is divided by is not 0."""
    heads, layers, budgets = plan.heads, plan.layers, list(dict(plan.layers[0].priced)) if plan.layers else []
    numbers = [*(one.layer for one in layers), *plan.whole]
    held = {
        "layers": bool(layers) and sorted(numbers) == [*range(len(numbers))],
        "layers, in order": [one.layer for one in layers] == sorted(one.layer for one in layers),
        "context, step and windows": min(plan.context, plan.step, plan.windows, plan.following) >= 1,
        "heads": 1 <= heads.cached <= heads.queries and heads.length >= 1 and max(vars(heads).values()) <= LARGEST_SIZE,
        "window": bool(plan.whole) or plan.window is None,
        "window of tokens": plan.window is None or plan.window >= 1,
        "priced budgets, the same in all layers": all(list(dict(one.priced)) == budgets for one in layers),
        "multipliers, one a limit": len(plan.certificate.multipliers) == 1 + len(plan.latency),
        "workloads": all(Workload.parse(one.workload).phase == "decode" for one in plan.workloads),
        "latencies": all(ns is None or ns > 0 for one in plan.workloads for ns in (one.dense_ns, one.plan_ns)),
    }
    if wrong := next((name for name, holds in held.items() if not holds), None):
        raise PlanError(f"plan of tokens has {wrong} out of range", "counts that can be", REMEDY)


def _within(timed: WorkloadLatency, fraction: float) -> bool:
    planned, dense = timed.plan_ns, timed.dense_ns
    return planned is not None and dense is not None and planned <= floored(fraction, dense)


def kept_of(own: int, context: int, tokens: int, step: int, where: str = ", of which none is kept") -> int:
    """What a budget of ``own`` of a context's tokens leaves of another context, of ``tokens``.

    That is ``floor(own * tokens / context)``, down to a multiple of the step where one fits; all where it is all.

    Args:
        where: what the error says of the context.

    Raises:
        GacError: nothing is left of so short a context.
    """
    if own == context:
        return tokens
    share = own * tokens // context
    if not share:
        expected = f"{-(-context // own)} or more, of which it keeps one"
        raise GacError(f"a context of {tokens} tokens{where}", expected, "Run so short a context without the plan.")
    return share // step * step or share


def either(given: Plan | TokenPlan | str | Path) -> Plan | TokenPlan:
    """A plan of weights or of tokens kept that is at hand, or the one in the file of this path.

    Raises:
        PlanError: it is neither.
    """
    if isinstance(given, (str, Path)):
        document = None
        with suppress(GacError):
            document = read_document(given, "plan", "a plan", PlanError)
        if isinstance(document, dict) and "press" in document:
            return TokenPlan.load(given)
    return given if isinstance(given, TokenPlan) else Plan.opened(given)


def check_one_kind(given: Iterable[Plan | TokenPlan | str | Path]) -> None:
    """Refuse plans of weights beside plans of tokens kept.

    Raises:
        PlanError: they are of two kinds, or one of them is no plan.
    """
    kinds = {type(either(one)) for one in given}
    if len(kinds) > 1:
        told = "a plan of weights beside one of another kind, of tokens kept"
        raise PlanError(told, "plans of one kind", "Compare plans of gac allocate, or plans of gac tokens.")


def facts(plan: TokenPlan) -> list[tuple[str, str]]:
    """Name and value pairs: what was asked, what is kept, what that loses, and what it saves."""
    proof = plan.certificate
    kept = f"{plan.used:,} of {plan.total:,} tokens ({plan.used / plan.total:.4f})"
    return [
        ("press", f"{plan.press}, contexts of {plan.context:,} tokens of {plan.text}"),
        ("kept", f"{kept}, limit {plan.limit:,}"),
        ("loss", f"{nats(plan.loss)} nats a token predicted, {proof.status}, gap {proof.gap:.3g}"),
        *(("memory", memory(plan, tokens)) for tokens in plan.contexts),
        *(("latency", latency(plan, one)) for one in plan.workloads),
        *([("profile", f"{used.gpu}, {used.digest[:12]}; {used.note}")] if (used := plan.profile) else []),
        *([("whole", whole(plan))] if plan.whole else []),
    ]


def memory(plan: TokenPlan, tokens: int) -> str:
    """The cache of one context, in words."""
    used, dense = plan.cache_bytes(tokens)
    return f"{megabytes(used)} of {megabytes(dense)} cached of {tokens:,} tokens, in 16 bits ({used / dense:.4f})"


def latency(plan: TokenPlan, one: WorkloadLatency) -> str:
    """Attention in all layers at a workload, in words."""
    limit = f", {plan.latency[one.workload]:g} allowed" if one.workload in plan.latency else ""
    if one.dense_ns is None or one.plan_ns is None:
        lacks = f"over what {number_of(one.unknown, 'layer')} keep" if one.unknown else "over the whole cache"
        measures = f"gac profile --model ... --tokens --workload {one.workload}"
        return f"{one.workload}: unknown, the table lacks attention {lacks} ({measures} measures it)"
    ratio = f"{one.plan_ns / one.dense_ns:.3f}x{limit}; {how_known(one)}"
    return f"{one.workload}: attention {duration(one.plan_ns)} of {duration(one.dense_ns)} dense ({ratio})"


def whole(plan: TokenPlan) -> str:
    """The layers that no press cuts, in words."""
    size = f"of a window of {plan.window:,} tokens" if plan.window else "that are not cut"
    return f"{number_of(len(plan.whole), 'layer')} {size}, which no limit of tokens counts"
