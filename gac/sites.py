"""What is measured and chosen between: sites, workloads, loss curves, candidate sets."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
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
        fused: positions of the first weights, whose first GEMMs run as one; empty where each runs by itself.
    """

    name: str
    layer: int
    kind: str
    weights: tuple[Weight, ...]
    fused: tuple[int, ...] = ()

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


def run_together(sites: Sequence[Site]) -> tuple[Site, ...]:
    """The sites as they are where weights that read the same input run their first GEMMs as one.

    Neighbouring sites whose weights read the same input become one site, so that their dims are chosen together.
    """
    found = []
    for _, group in groupby(sites, key=lambda site: site.weights[0].reads or site.name):
        members = list(group)
        weights = tuple(weight for site in members for weight in site.weights)
        fused = tuple(at for at, weight in enumerate(weights) if weight.reads is not None)
        assert fused == tuple(range(len(fused))), f"{members[0].name}: weights that share an input come first"
        site = members[0]
        if len(members) > 1:
            kind = "+".join(member.kind for member in members)
            site = Site(f"{weights[0].reads}.{kind}", site.layer, kind, weights)
        found.append(replace(site, fused=fused))
    return tuple(found)


def as_run(sites: Sequence[Site], fused: bool) -> tuple[Site, ...]:
    """The sites of a plan: together where it is ``fused``, otherwise as they are."""
    return run_together(sites) if fused else tuple(sites)


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


def curves_together(sites: Sequence[Site], curves: Sequence[SiteCurves]) -> tuple[SiteCurves, ...]:
    """The same curves for sites that ``run_together`` made of the curves' own."""
    low_rank = {name: curve for one in curves for name, curve in one.low_rank.items()}
    narrow = {one.site: one.narrow for one in curves}
    return tuple(
        SiteCurves(
            site.name,
            {weight.name: low_rank[weight.name] for weight in site.weights if weight.name in low_rank},
            narrow.get(site.name),
        )
        for site in sites
    )


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
        return self.at(slice(index, index + 1))

    def at(self, cut: slice | NDArray[np.bool_]) -> "CandidateSet":
        """Some of the candidates."""
        return CandidateSet(
            self.site,
            self.forms[cut],
            self.dims[cut],
            self.params[cut],
            self.loss[cut],
            self.latency[cut],
            self.interpolated[cut],
        )
