"""The evidence of a plan: the model, the calibration text, the latency table, and later training."""

from dataclasses import InitVar, dataclass
from math import exp, inf

from gac.models.basis import Rotation
from gac.models.experts import RoutedParams
from gac.schemes import DEFAULT_SCHEME, scheme_named

FEWEST_TOKENS = 2**12
"""Tokens of calibration text, in two windows or more, from which predictions were right (results/quality.md)."""

_LARGEST = 709.0  # e to this power is about 8e307, near the largest float64


@dataclass(frozen=True)
class CalibrationPart:
    """One of several calibration texts.

    Attributes:
        text: its name or path.
        windows: their number.
        loss: the dense model's mean loss on it, nats a token; None in plans of earlier versions.
        weight: of each of its tokens, see ``Measure.balance``.
    """

    text: str
    windows: int
    loss: float | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Calibration:
    """The text that the statistics were taken from.

    Attributes:
        text: its name or path; the number of documents given in memory; several texts with their windows.
        windows: the number of windows, each of ``window_tokens`` tokens; 0 in ``UNMEASURED``.
        digest: SHA-256 of the token ids.
        loss: the dense model's mean loss on it, nats a token.
        documents: the beginning of the SHA-256 of each document given in memory. Such a plan is applied with the same
            documents, and is not to be evaluated on them.
        bos: every window begins with BOS, in the place of one token of text.
        parts: where there are several texts, each of them; ``windows`` counts those of all, interleaved.
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
    def tokens(self) -> int:
        return self.windows * self.window_tokens

    @property
    def little(self) -> bool:
        """True where losses may be predicted far too low: one window has no halves to be cross-fitted."""
        return self.windows < 2 or self.tokens < FEWEST_TOKENS

    @property
    def texts(self) -> tuple[CalibrationPart, ...]:
        """Every text with its windows, also a single one."""
        return self.parts or (CalibrationPart(self.text, self.windows),)

    def __str__(self) -> str:
        """``64 x 1024 tokens of wiki-sample, no BOS``."""
        head = "BOS at the head of every window" if self.bos else "no BOS"
        return f"{self.windows} x {self.window_tokens} tokens of {self.text}, {head}"


UNMEASURED = Calibration("none", 0, 0, "", 0.0)
"""The calibration of a plan that states what others pruned, and predicts nothing."""


@dataclass(frozen=True)
class ProfileUsed:
    """The latency table behind the plan; ``note`` is the reason for it, where it was not the local GPU's.

    ``error`` is the median relative error of modelled latencies on shapes left out of the model; None without any.
    """

    gpu: str
    digest: str
    note: str
    error: float | None = None


@dataclass(frozen=True)
class RoundedHead:
    """Quantised embedding and LM head.

    Attributes:
        shapes: rows and columns of each stored matrix: of one where the head is tied to the embedding.
        loss: divergence of the dense model's predictions when they alone are quantised, nats a token.
    """

    scheme: str
    shapes: tuple[tuple[int, int], ...]
    loss: float

    @property
    def is_valid(self) -> bool:
        return 1 <= len(self.shapes) <= 2 and min(map(min, self.shapes)) > 0 and 0 <= self.loss < inf

    @property
    def params(self) -> int:
        return sum(rows * columns for rows, columns in self.shapes)

    @property
    def bytes(self) -> int:
        return sum(scheme_named(self.scheme).bytes(*shape) for shape in self.shapes)

    @property
    def dense_bytes(self) -> int:
        return sum(scheme_named(DEFAULT_SCHEME).bytes(*shape) for shape in self.shapes)


@dataclass(frozen=True)
class Healed:
    """A training of the compressed model towards the dense one, after the plan was applied.

    Attributes:
        texts: names of the training texts; ``self`` was sampled from the dense model.
        held: the number of held-out windows.
        tokens: tokens trained on, repetitions included.
        learning_rate: relative to the size of each weight.
        before, after: KL(dense || compressed) on the held-out windows, nats a token.
        blocks: the share of the work that trained decoder layers one at a time.
        dense: weights that the plan leaves dense were trained too.
        labels: the weight of the text's own next tokens in the loss at the end.
        asked: requested tokens; 0 where a time was requested.
        documents, bos: as in ``Calibration``.
        compressing: it was the last part of ``gac.compress``.
    """

    texts: tuple[str, ...]
    windows: int
    window_tokens: int
    held: int
    tokens: int
    learning_rate: float
    seed: int
    before: float
    after: float
    blocks: float
    dense: bool = False
    labels: float = 0.0
    asked: int = 0
    documents: tuple[str, ...] = ()
    bos: bool = False
    compressing: bool = False
    seconds: InitVar[float | None] = None  # in plans of earlier versions; equal trainings take unequal times

    @property
    def is_valid(self) -> bool:
        counts = min(len(self.texts), self.windows, self.window_tokens, self.held, self.tokens)
        positive = counts > 0 and min(self.seed, self.before, self.after) >= 0 and self.learning_rate > 0
        return positive and 0 <= self.labels < 1 and self.asked >= 0

    def __str__(self) -> str:
        """``wiki-sample, 171 x 1024 tokens, 1,234,567 tokens read``."""
        return f"{' and '.join(self.texts)}, {self.windows} x {self.window_tokens} tokens, {self.tokens:,} tokens read"


@dataclass(frozen=True)
class ExpertTokens:
    """The calibration tokens that reach an expert of a layer, of those in the sample on which experts are measured."""

    layer: int
    sampled: int
    least: int
    median: int


@dataclass(frozen=True)
class Measured:
    """The measurements behind a plan or a frontier.

    Attributes:
        model: its name or path.
        digest: SHA-256 of the targeted weights.
        params: of the whole dense model, embeddings and head included.
        family: its ``model_type``.
        factor: the one fitted number between the summed curvature and the measured loss.
        error: expected error of the predicted loss, as a share of it; None where the method's predictions were never
            compared with measurements.
        rotation: of the weights, before anything was measured; None without.
        head: quantised embedding and head; None where they stay as they were loaded.
        experts: parameters of the routed experts, where they stay as they are; None without.
        expert_tokens: of each layer of which some experts may go.
        on_grid: rounding was priced on weights that were in few bits before, and lie on that grid still.
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
    head: RoundedHead | None = None
    on_grid: bool = False
    experts: RoutedParams | None = None
    expert_tokens: tuple[ExpertTokens, ...] = ()

    @property
    def untied(self) -> int:
        """Parameters of a head that rotation has untied."""
        return self.rotation.untied if self.rotation else 0

    @property
    def lost_by_head(self) -> float:
        """Loss by quantising embedding and head, nats a token, whatever is chosen."""
        return self.head.loss if self.head else 0.0

    @property
    def predicted(self) -> bool:
        return self.calibration != UNMEASURED

    def perplexity(self, loss: float) -> float:
        """The perplexity on the calibration text at a predicted loss, at most e**709."""
        return exp(min(self.calibration.loss + loss, _LARGEST))

    def error_margin_text(self) -> str:
        """The error of a predicted loss, ``, give or take 15 %``, or a warning of little text; empty where unknown."""
        text = self.calibration
        if self.predicted and text.little:
            return f" (from {text.windows} x {text.window_tokens} tokens alone, so it may be far too low)"
        return "" if self.error is None else f", give or take {100 * self.error:.0f} %"
