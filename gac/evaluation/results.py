"""Results of an evaluation, each with its protocol. Loads no torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from statistics import fmean

from gac.core.display import Row, Shown, Table
from gac.plan.plan import Plan


@dataclass(frozen=True, repr=False)
class Perplexity(Shown):
    """A perplexity and how it was measured."""

    value: float  # exp of the mean negative log-likelihood
    tokens: int  # the number of predicted tokens
    protocol: str  # text, windows, length, first token, overlap, BOS
    dtype: str  # of the model's weights
    text: str = ""  # its name or path
    digest: str = ""  # SHA-256 of the token ids

    def tables(self) -> Sequence[Table | str]:
        columns = [("perplexity", ">"), ("tokens predicted", ">"), ("dtype", "<")]
        return [Table(columns, [(f"{self.value:.3f}", f"{self.tokens:,}", self.dtype)], notes=self.protocol)]

    def rows(self) -> Sequence[Row]:
        return [asdict(self)]

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.protocol}; {self.tokens:,} tokens predicted, {self.dtype})"


@dataclass(frozen=True)
class Divergence:
    """Divergence of a model's next-token distributions from a reference model's on the same tokens."""

    kl: float  # mean of KL(reference || model), nats a token
    top1: float  # fraction of tokens at which both models have the same most probable token
    tokens: int  # the number of tokens
    protocol: str  # as for a perplexity
    dtype: str  # of the models' weights
    reference_dtype: str

    def __str__(self) -> str:
        dtypes = f"{self.dtype} against {self.reference_dtype}"
        return f"KL {self.kl:.4f} nats, top-1 {self.top1:.1%} ({self.protocol}; {self.tokens:,} tokens, {dtypes})"


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task of lm-evaluation-harness."""

    task: str  # the name of the task or group
    metric: str  # ``acc``, ``acc_norm``, ...; with its filter, if any, after a comma
    value: float  # as the harness gives it, a fraction for accuracies
    stderr: float | None  # the standard error, if the harness gives one
    items: int  # the number of items, from the first on
    total: int  # the number of items of the task
    num_fewshot: int | None  # examples before every item; None for a group of tasks that differ
    version: str  # of the task
    harness: str  # name and version of the harness
    dtype: str  # of the model's weights


@dataclass(frozen=True)
class OnText:
    """Results of a model on one text."""

    perplexity: Perplexity
    divergence: Divergence | None = None


@dataclass(frozen=True)
class Evaluated:
    """All results of one model; those not asked for are None or empty."""

    name: str  # the directory, hub id or name of the model
    parameters: int  # their number, tied ones counted once
    dtype: str  # of its weights
    perplexity: Perplexity | None = None
    divergence: Divergence | None = None
    scores: tuple[TaskScore, ...] = ()
    plan: Plan | None = None  # its compression plan
    predicted: float | None = None  # the plan's ln(perplexity / dense) on its text, if its dense model is known
    also: tuple[OnText, ...] = ()  # perplexity and divergence on further texts

    @property
    def texts(self) -> tuple[OnText, ...]:
        """The results on each text, the first one included."""
        return () if self.perplexity is None else (OnText(self.perplexity, self.divergence), *self.also)


@dataclass(frozen=True)
class Evaluation:
    """Models measured alike, and the model they are compared with, if any."""

    models: tuple[Evaluated, ...]
    against: Evaluated | None = None

    @property
    def all_models(self) -> list[Evaluated]:
        return [*([] if self.against is None else [self.against]), *self.models]

    def log_ratio(self, model: Evaluated, text: int = 0) -> float | None:
        """The loss ln(perplexity / that of ``against``) on a text, nats a token; None if either is missing."""
        if self.against is None or not self.against.texts or not model.texts:
            return None
        return log(model.texts[text].perplexity.value / self.against.texts[text].perplexity.value)

    def mean_log_ratio(self, model: Evaluated) -> float | None:
        """The mean of ``log_ratio`` over all texts, nats a token; None if it is missing."""
        ratios = [self.log_ratio(model, text) for text in range(len(model.texts))]
        known = [ratio for ratio in ratios if ratio is not None]
        return fmean(known) if known else None

    @property
    def mean_ratios(self) -> tuple[float | None, ...]:
        """Of each of ``models``, the geometric mean over all texts of perplexity / that of ``against``."""
        means = map(self.mean_log_ratio, self.models)
        return tuple(None if mean is None else exp(mean) for mean in means)

    def predicted_loss(self, model: Evaluated, text: int = 0) -> float | None:
        """The loss that the plan predicts on a text, nats a token.

        None if it predicts none, the dense model is not known, or the text is none that the plan was calibrated on.
        """
        if self.against is None or not self.against.texts or model.plan is None or model.predicted is None:
            return None
        losses = {model.plan.measured.calibration.text: model.predicted}
        losses |= {by.text: by.loss for by in model.plan.prediction.by_text}
        return losses.get(model.texts[text].perplexity.text)

    def predicted_perplexity(self, model: Evaluated, text: int = 0) -> float | None:
        """The perplexity of ``against`` on a text times exp(``predicted_loss``)."""
        loss = self.predicted_loss(model, text)
        return None if loss is None or self.against is None else self.against.texts[text].perplexity.value * exp(loss)
