"""What a plan rests on: the model, the text and the latency table, as they were found."""

from dataclasses import InitVar, dataclass
from math import exp, inf

from gac.models.basis import Rotation
from gac.schemes import DEFAULT_SCHEME, scheme_named

FEWEST_TOKENS = 2**12
"""Tokens of calibration text, in two windows or more, from which predictions were right (docs/results-quality.md)."""

_LARGEST = 709.0  # e to this power is about 8e307, near the largest float64


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
    def tokens(self) -> int:
        """Of all windows."""
        return self.windows * self.window_tokens

    @property
    def little(self) -> bool:
        """Whether losses may be predicted far too low: one window has no halves to be cross-fitted."""
        return self.windows < 2 or self.tokens < FEWEST_TOKENS

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
    """The latency table behind the plan.

    Attributes:
        note: why it, where it was not the local GPU's.
        error: the median relative error of modelled latencies on shapes left out of the model; None where no latency
            is modelled.
    """

    gpu: str
    digest: str
    note: str
    error: float | None = None


@dataclass(frozen=True)
class RoundedHead:
    """Embedding and head where they are rounded.

    Attributes:
        scheme: of both.
        shapes: rows and columns of each matrix that is stored: of one where the head is tied to the embedding.
        loss: how far the dense model's predictions diverge when they alone are rounded, nats a token.
    """

    scheme: str
    shapes: tuple[tuple[int, int], ...]
    loss: float

    @property
    def is_valid(self) -> bool:
        """Whether there can be such matrices, and such a loss."""
        return 1 <= len(self.shapes) <= 2 and min(map(min, self.shapes)) > 0 and 0 <= self.loss < inf

    @property
    def params(self) -> int:
        """Numbers of the matrices."""
        return sum(rows * columns for rows, columns in self.shapes)

    @property
    def bytes(self) -> int:
        """Scales among them."""
        return sum(scheme_named(self.scheme).bytes(*shape) for shape in self.shapes)

    @property
    def dense_bytes(self) -> int:
        """In 16 bits."""
        return sum(scheme_named(DEFAULT_SCHEME).bytes(*shape) for shape in self.shapes)


@dataclass(frozen=True)
class Healed:
    """A training of the compressed model towards the dense one, after the plan was applied.

    Attributes:
        texts: the names of what it was trained on; ``self`` is what the dense model wrote itself.
        windows: how many windows, each of ``window_tokens`` tokens; those that were held out are not among them.
        held: windows that were held out.
        tokens: that were read in training; what was read twice counts twice.
        learning_rate: relative to the size of each weight.
        seed: of the order of the text, and of text that the model wrote.
        before: the divergence from the dense model on what was held out, nats a token, KL(dense || compressed).
        after: the same of the healed model, as it is stored.
        blocks: the part of the work that went to decoder layers by themselves.
        dense: whether weights that the plan leaves dense were trained too.
        labels: the part of the loss that was the text's own next tokens at the end; the rest was that divergence.
        asked: tokens that were asked for; 0 where a time was.
        documents: the beginning of the SHA-256 of each document, where they were given in memory.
        bos: every window begins with BOS.
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
    seconds: InitVar[float | None] = None  # in plans of earlier versions; equal trainings take unequal times

    @property
    def is_valid(self) -> bool:
        """Whether its numbers can be."""
        counts = min(len(self.texts), self.windows, self.window_tokens, self.held, self.tokens)
        possible = counts > 0 and min(self.seed, self.before, self.after) >= 0 and self.learning_rate > 0
        return possible and 0 <= self.labels < 1 and self.asked >= 0

    def __str__(self) -> str:
        """``wiki-sample, 171 x 1024 tokens, 1,234,567 tokens read``."""
        return f"{' and '.join(self.texts)}, {self.windows} x {self.window_tokens} tokens, {self.tokens:,} tokens read"


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
            predictions were never compared with measurements, nor those from so little text.
        rotation: what was rotated before anything was measured; None where nothing was.
        head: embedding and head where they are rounded; None where they stay as they were loaded.
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

    @property
    def untied(self) -> int:
        """Parameters of a head that rotation has untied."""
        return self.rotation.untied if self.rotation else 0

    @property
    def lost_by_head(self) -> float:
        """What rounding embedding and head loses, nats a token, whatever is chosen."""
        return self.head.loss if self.head else 0.0

    @property
    def predicted(self) -> bool:
        """Whether the loss of the plan was predicted."""
        return self.calibration != UNMEASURED

    def perplexity(self, loss: float) -> float:
        """On the calibration text, for a predicted loss; the smallest budgets of large models lose hundreds of nats."""
        return exp(min(self.calibration.loss + loss, _LARGEST))

    def error_margin_text(self) -> str:
        """``, give or take 15 %``, the error of a predicted loss; nothing where it is not known, but of little text."""
        text = self.calibration
        if self.predicted and text.little:
            return f" (from {text.windows} x {text.window_tokens} tokens alone, so it may be far too low)"
        return "" if self.error is None else f", give or take {100 * self.error:.0f} %"
