"""The plan of tokens kept: one budget a layer, what each share was measured to lose, and the proof."""

from dataclasses import dataclass
from math import fsum

from gac.errors import GacError, PlanError
from gac.io import Record
from gac.plan import Certificate

SCHEMA = 1


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


@dataclass(frozen=True)
class TokenPlan(Record):
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
        certificate: that no choice of the priced budgets within the limit loses less.
        layers: those that the press may cut, in order.
        whole: those that it may not, since their attention is of a sliding window; no limit counts them.
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
    whole: tuple[int, ...] = ()
    _error = PlanError

    def __post_init__(self) -> None:
        self._check_schema(self.schema_version, SCHEMA)
        for one in self.layers:
            aligned = one.kept == self.context or (0 < one.kept < self.context and one.kept % self.step == 0)
            if not aligned or one.kept not in dict(one.priced):
                expected = f"one of its priced budgets, a multiple of {self.step} or {self.context}"
                raise PlanError(f"layer {one.layer} keeps {one.kept} tokens", expected, "Make the plan again.")
        if self.used > self.limit:
            given = f"a plan that keeps {self.used:,} tokens"
            raise PlanError(given, f"at most its limit of {self.limit:,}", "Make the plan again.")

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

    def kept(self, layer: int, tokens: int) -> int:
        """How many tokens a layer keeps of a context of any length.

        That is ``floor(kept * tokens / context)``, down to a multiple of the step where one fits.

        Raises:
            GacError: none is left of so short a context.
        """
        own = next((one.kept for one in self.layers if one.layer == layer), self.context)
        if own == self.context:
            return tokens
        share = own * tokens // self.context
        if not share:
            given = f"a context of {tokens} tokens, of which layer {layer} keeps none"
            least = -(-self.context // own)
            raise GacError(given, f"{least} or more, of which it keeps one", "Run so short a context without the plan.")
        return share // self.step * self.step or share
