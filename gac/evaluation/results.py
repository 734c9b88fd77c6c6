"""What an evaluation found: every number with its protocol. Loads no torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, log

from gac.core.display import Row, Shown, Table
from gac.plan.plan import Plan


@dataclass(frozen=True, repr=False)
class Perplexity(Shown):
    """A perplexity and how it was measured.

    Attributes:
        value: exp of the mean negative log-likelihood.
        tokens: how many tokens were predicted.
        protocol: text, windows, length, where they begin, overlap, BOS.
        dtype: of the model's weights.
        text: its name or path.
    """

    value: float
    tokens: int
    protocol: str
    dtype: str
    text: str = ""

    def tables(self) -> Sequence[Table | str]:
        columns = [("perplexity", ">"), ("tokens predicted", ">"), ("dtype", "<")]
        return [Table(columns, [(f"{self.value:.3f}", f"{self.tokens:,}", self.dtype)], notes=self.protocol)]

    def rows(self) -> Sequence[Row]:
        return [asdict(self)]

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.protocol}; {self.tokens:,} tokens predicted, {self.dtype})"


@dataclass(frozen=True)
class Divergence:
    """How far a model's next-token distributions are from a reference model's on the same tokens.

    Attributes:
        kl: mean of KL(reference || model), nats a token.
        top1: fraction of the tokens at which both models' most probable token is the same.
        tokens: at how many tokens.
        protocol: as a perplexity's.
        dtype: of the model's weights.
        reference_dtype: of the reference's.
    """

    kl: float
    top1: float
    tokens: int
    protocol: str
    dtype: str
    reference_dtype: str

    def __str__(self) -> str:
        dtypes = f"{self.dtype} against {self.reference_dtype}"
        return f"KL {self.kl:.4f} nats, top-1 {self.top1:.1%} ({self.protocol}; {self.tokens:,} tokens, {dtypes})"


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task of lm-evaluation-harness.

    Attributes:
        task: the task's or group's name.
        metric: ``acc``, ``acc_norm``, ...; with its filter after a comma where it has one.
        value: as the harness gives it, a fraction for accuracies.
        stderr: its standard error, where the harness knows one.
        items: on how many items, from the first on.
        total: how many the task has.
        num_fewshot: examples before every item; None for a group of tasks that differ.
        version: of the task.
        harness: the name and version of what ran it.
        dtype: of the model's weights.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    items: int
    total: int
    num_fewshot: int | None
    version: str
    harness: str
    dtype: str


@dataclass(frozen=True)
class OnText:
    """What was measured of a model on one text."""

    perplexity: Perplexity
    divergence: Divergence | None = None


@dataclass(frozen=True)
class Evaluated:
    """Everything that was measured of one model; what was not asked for is None or empty.

    Attributes:
        name: the directory, hub id or name it was opened by.
        parameters: how many it has, tied ones counted once.
        dtype: of its weights.
        plan: the one that it was compressed by.
        predicted: what the plan promised for ln(perplexity / dense), where it was compared with that dense model.
        also: the same perplexity and divergence on each further text.
    """

    name: str
    parameters: int
    dtype: str
    perplexity: Perplexity | None = None
    divergence: Divergence | None = None
    scores: tuple[TaskScore, ...] = ()
    plan: Plan | None = None
    predicted: float | None = None
    also: tuple[OnText, ...] = ()

    @property
    def texts(self) -> tuple[OnText, ...]:
        """What was measured on each text, the first one included."""
        return () if self.perplexity is None else (OnText(self.perplexity, self.divergence), *self.also)


@dataclass(frozen=True)
class Evaluation:
    """Models measured alike, and where there is one the model they are compared with."""

    models: tuple[Evaluated, ...]
    against: Evaluated | None = None

    def log_ratio(self, model: Evaluated, text: int = 0) -> float | None:
        """ln(perplexity / that of ``against``), what is lost in nats a token; None where either was not measured.

        Args:
            text: the number of the text.
        """
        if self.against is None or not self.against.texts or not model.texts:
            return None
        return log(model.texts[text].perplexity.value / self.against.texts[text].perplexity.value)

    def predicted_perplexity(self, model: Evaluated, text: int = 0) -> float | None:
        """The plan's prediction on this text: the other model's perplexity here, times exp of the predicted loss."""
        if self.against is None or not self.against.texts or model.predicted is None:
            return None
        return self.against.texts[text].perplexity.value * exp(model.predicted)
