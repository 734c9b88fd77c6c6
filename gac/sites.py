"""What is measured and chosen between: sites, workloads, loss curves, candidate sets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gac.errors import GacError
from gac.forms import Weight

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Site:
    """A place in the model that one choice governs.

    Attributes:
        name: dotted module name (``model.layers.0.mlp``, ``model.layers.0.self_attn.q_proj``).
        layer: index of the decoder layer.
        kind: what it is in the family's words (``q_proj``, ..., ``mlp``); the same in every layer.
        weights: the linear weights it governs; ``narrow`` takes them all at once.
    """

    name: str
    layer: int
    kind: str
    weights: tuple[Weight, ...]

    @property
    def params(self) -> int:
        return sum(weight.params for weight in self.weights)

    @property
    def neurons(self) -> int | None:
        """How many neurons ``narrow`` can remove from, or None where the site has none."""
        for weight in self.weights:
            if weight.neurons == "in":
                return weight.in_features
        return None


_WORKLOAD = re.compile(r"(prefill):(\d+)x(\d+)|(decode):(\d+)@(\d+)")


@dataclass(frozen=True)
class Workload:
    """``prefill:BxS`` (batch B of S tokens) or ``decode:B@C`` (batch B, C tokens of context)."""

    phase: Literal["prefill", "decode"]
    batch: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> "Workload":
        """Read ``prefill:1x1024`` or ``decode:1@1024``.

        Raises:
            GacError: the text is neither.
        """
        match = _WORKLOAD.fullmatch(text)
        numbers = [int(part) for part in match.groups() if part and part.isdigit()] if match else []
        if not match or 0 in numbers:
            raise GacError(
                f"workload {text!r}",
                "prefill:BxS or decode:B@C with positive integers",
                "Write it like prefill:1x1024 or decode:1@1024.",
            )
        return cls("prefill" if match[1] else "decode", *numbers)

    @property
    def rows(self) -> int:
        """Rows of every linear layer's input: tokens that run at once."""
        return self.batch * self.tokens if self.phase == "prefill" else self.batch

    def __str__(self) -> str:
        sign = "x" if self.phase == "prefill" else "@"
        return f"{self.phase}:{self.batch}{sign}{self.tokens}"


@dataclass(frozen=True, eq=False)
class LossCurve:
    """What each dim of one form loses: ``loss[d]`` nats a token at dim d, for d = 0 .. full.

    ``loss`` has shape ``(full + 1,)``, never rises, and is 0 at the full dim.
    """

    loss: Floats

    @property
    def full(self) -> int:
        return len(self.loss) - 1


@dataclass(frozen=True, eq=False)
class SiteCurves:
    """The loss curves of one site: ``low_rank`` by weight name, and ``narrow`` where it has neurons."""

    site: str
    low_rank: Mapping[str, LossCurve]
    narrow: LossCurve | None = None


@dataclass(frozen=True, eq=False)
class CandidateSet:
    """The candidates of one site, one a row, sorted by params and then loss.

    Attributes:
        site: the site's name.
        forms: form name of each weight, shape ``(n, weights)``, dtype str.
        dims: dim of each weight, shape ``(n, weights)``.
        params: exact parameters, shape ``(n,)``.
        loss: predicted loss increase in nats a token, shape ``(n,)``.
        latency: ns for each workload, rounded up, shape ``(n, workloads)``; -1 where unknown.
        interpolated: how many of the weights' latencies were interpolated, ``(n, workloads)``.
    """

    site: str
    forms: NDArray[np.str_]
    dims: Ints
    params: Ints
    loss: Floats
    latency: Ints
    interpolated: Ints

    def __len__(self) -> int:
        return len(self.params)

    def row(self, index: int) -> "CandidateSet":
        """One candidate, as a set of one."""
        cut = slice(index, index + 1)
        return CandidateSet(
            self.site,
            self.forms[cut],
            self.dims[cut],
            self.params[cut],
            self.loss[cut],
            self.latency[cut],
            self.interpolated[cut],
        )
