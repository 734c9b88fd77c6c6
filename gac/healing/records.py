"""Records of a distillation run: its budget, its progress and its result. Loads no torch."""

from dataclasses import dataclass

from gac.core.errors import GacError, HealingError

MINUTES = 5.0  # the default training time
MAX_MINUTES = 525_600
TOKENS = 524_288  # that compression trains on at its end, by default on a GPU
BLOCKS = 0.1  # the default share of the work that trains decoder layers one at a time
RATE, RATE_PARAMS = 2e-3, 1.35e8
"""The learning rate of a model with this many parameters; it falls with the fourth root of the parameter count."""


@dataclass(frozen=True)
class TrainingBudget:
    """The amount of training, and its settings; a GacError if a number is out of range.

    The learning rate is relative: a full step moves the entries of a weight by about this fraction of their root mean
    square (Adafactor, arXiv 1804.04235, section 8), so that one rate suits factors, norms and scales alike.
    """

    minutes: float | None  # wall-clock time, everything included; 5 unless ``tokens``, to train on, are given
    tokens: int | None
    learning_rate: float
    blocks: float  # the share of the work that trains decoder layers one at a time, from 0 to 1
    dense: bool  # train the weights that the plan leaves dense, too
    labels: float  # the weight of the cross-entropy on the text's own next tokens late in training, in [0, 1)
    seed: int  # of the order of the text

    def __post_init__(self) -> None:
        minutes = self.minutes
        if minutes is not None and self.tokens is not None:
            raise GacError(f"minutes={minutes:g} and tokens={self.tokens:,}", "one of the two", "Leave one out.")
        if minutes is None and self.tokens is None:
            object.__setattr__(self, "minutes", MINUTES)
        size, share = "a fraction of the weights' size", "the share of the work that trains single layers, from 0 to 1"
        for name, valid, expected, remedy in (
            ("minutes", minutes is None or 0 < minutes <= MAX_MINUTES, "minutes above 0, a year at most", "5"),
            ("learning_rate", 0 < self.learning_rate < 1, f"{size}, above 0 and below 1", f"{RATE:g}, or leave it out"),
            ("blocks", 0 <= self.blocks <= 1, share, f"{BLOCKS:g}"),
            ("labels", 0 <= self.labels < 1, "the weight of the text's own tokens in the loss, in [0, 1)", "0.5"),
            ("seed", 0 <= self.seed < 2**32, "a seed from 0 up to below 2 ** 32", "0"),
        ):
            if not valid:
                raise GacError(f"{name}={getattr(self, name)}", expected, f"Try {remedy}.")
        if self.labels and self.blocks == 1:
            expected, remedy = "steps of the whole model, which labels are for", "Use a smaller blocks, or no labels."
            raise GacError(f"labels={self.labels:g} with blocks=1", expected, remedy)


def default_rate(params: int) -> float:
    return float(f"{RATE * (RATE_PARAMS / max(params, RATE_PARAMS)) ** 0.25:.2g}")


@dataclass(frozen=True)
class LossPoint:
    """A point of a loss curve; tokens and seconds are counted over both phases."""

    phase: str  # ``blocks`` (losses are relative errors of one layer's output) or ``model`` (nats a token)
    step: int  # the step of the phase; the layer in ``blocks``
    tokens: int
    seconds: float
    train_loss: float  # the mean training loss since the last point; in ``blocks`` the held-out loss before training
    heldout_loss: float


@dataclass(frozen=True)
class Progress:
    """The progress of a run; losses are in nats a token."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
    start_loss: float  # held out, before training
    best_loss: float  # held out, the smallest so far
    layers: int = 0  # trained by themselves
    steps: int = 0  # of the whole model
    tokens: int = 0
    seconds: float = 0.0
    spent: float = 0.0  # tokens or seconds spent on the whole model
    cooling_start: float | None = None  # the share of that work at which overfitting made the rate fall early
    recent_losses: tuple[float, ...] = ()  # training losses since the last point of the curve
    curve: tuple[LossPoint, ...] = ()

    @property
    def improved(self) -> bool:
        return self.best_loss < self.start_loss


@dataclass(frozen=True, eq=False)
class Result:
    """The final progress, and the error that stopped the run early, if any."""

    progress: Progress
    failure: HealingError | None = None
