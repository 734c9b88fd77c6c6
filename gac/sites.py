"""What is measured and chosen between: sites, workloads, loss curves, candidate sets."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gac.errors import GacError, PlanError
from gac.forms import FORMS, Form, Fusing, Shorter, Weight, form_named

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Site:
    """A place in the model that one choice governs.

    Attributes:
        name: dotted module name (``model.layers.0.mlp``, ``model.layers.0.self_attn.q_proj``).
        layer: index of the decoder layer.
        kind: what it is in the family's words (``q_proj``, ..., ``mlp``); the same in every layer.
        weights: the linear weights it governs; ``narrow`` and ``head_dim`` take several of them at once.
        fused: positions of the first weights, whose first GEMMs run as one; empty where each runs by itself.
        either: whether they may run by themselves as well, so that this is chosen too.
    """

    name: str
    layer: int
    kind: str
    weights: tuple[Weight, ...]
    fused: tuple[int, ...] = ()
    either: bool = False

    @property
    def layouts(self) -> "tuple[Site, ...]":
        """The ways in which it may run: itself, or apart (the first) and fused."""
        return (self.run(shared=False), self.run(shared=True)) if self.either else (self,)

    def run(self, shared: bool) -> "Site":
        """The site where it is chosen whether its weights share a GEMM."""
        return replace(self, fused=self.fused if shared else (), either=False)

    @property
    def params(self) -> int:
        return sum(weight.params for weight in self.weights)

    def taken_by(self, form: Form) -> tuple[int, ...]:
        """Positions of the weights that a form shortens together; empty where it finds no two sides that meet."""
        found = tuple(at for at, weight in enumerate(self.weights) if form.shortens(weight))
        sides = {form.shortens(self.weights[at]) for at in found}
        return found if sides == {"out", "in"} else ()


def run_together(sites: Sequence[Site], either: bool = False) -> tuple[Site, ...]:
    """The sites as they are where weights that read the same input run their first GEMMs as one.

    Neighbouring sites whose weights read the same input become one site, so that their dims are chosen together.

    Args:
        either: whether the weights of each such site may run by themselves as well.
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
        found.append(replace(site, fused=fused, either=either and len(fused) > 1))
    return tuple(found)


def as_planned(sites: Sequence[Site], forms: Sequence[str], fused: Fusing) -> tuple[Site, ...]:
    """The family's sites as a plan decides on them.

    Neighbours that one of the forms shortens on sides that meet (v_proj and o_proj, by ``head_dim``) become one site,
    and where it is ``fused`` (or ``auto``: may be) so do those that read the same input.
    """
    for form in map(form_named, forms):
        sites = _joined(sites, form)
    return run_together(sites, either=fused == "auto") if fused else tuple(sites)


def check_run(fuse: object, one_row: object) -> None:
    """Refuse what is no way to run.

    Raises:
        PlanError: ``fuse`` is neither a bool nor ``auto``, or ``one_row`` is no bool.
    """
    if not isinstance(fuse, bool) and fuse != "auto":
        raise PlanError(f"fuse={fuse!r}", "True, False or 'auto'", "Leave it out to fuse nothing.")
    if not isinstance(one_row, bool):
        raise PlanError(f"one_row={one_row!r}", "True or False", "Leave it out to run one row as PyTorch does.")


def _joined(sites: Sequence[Site], form: Form) -> list[Site]:
    found: list[Site] = []
    for site in sites:
        last = found[-1] if found else None
        if last and form.shortens(last.weights[-1]) == "out" and form.shortens(site.weights[0]) == "in":
            kind = f"{last.kind}+{site.kind}"
            found[-1] = Site(f"{last.name}+{site.kind}", site.layer, kind, last.weights + site.weights)
        else:
            found.append(site)
    return found


def check_forms_fit(sites: Sequence[Site], forms: Sequence[str], model_type: str) -> None:
    """Refuse a form that no weight of the model can take.

    Args:
        sites: the family's.
        model_type: what the error calls the model.

    Raises:
        PlanError: there is such a form, or a form is unknown.
    """
    fitting = [name for name, form in FORMS.items() if _fits(sites, form)]
    for name in forms:
        if form_named(name).kind not in fitting:
            raise PlanError(
                f"form {name}, which fits no weight of a {model_type} model",
                f"one of {', '.join(fitting)}",
                "Leave it out.",
            )


def _fits(sites: Sequence[Site], form: Form) -> bool:
    """Forms that shorten a side need another weight that meets it there; the others take any weight."""
    if not isinstance(form, Shorter):
        return any(form.takes(weight) for site in sites for weight in site.weights)
    return any(site.taken_by(form) for site in as_planned(sites, [form.name], fused=False))


def short_names(names: Sequence[str]) -> dict[str, str]:
    """What to call the weights of one layer: the last part of a name, after the part before it where two end alike."""
    parts = {name: name.split(".") for name in names}
    ends = Counter(found[-1] for found in parts.values())
    return {name: ".".join(found[-2:] if ends[found[-1]] > 1 else found[-1:]) for name, found in parts.items()}


_WORKLOAD = re.compile(r"(prefill):([0-9]{1,9})x([0-9]{1,9})|(decode):([0-9]{1,9})@([0-9]{1,9})")


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

    def scaled(self, share: float) -> "LossCurve":
        """Where only a share of each loss is expected."""
        return LossCurve(share * self.loss)


@dataclass(frozen=True, eq=False)
class SiteCurves:
    """The loss curves of one site.

    Attributes:
        low_rank: by weight name.
        grouped: likewise, of the weights that groups of heads were measured for.
        shorter: of the forms that shorten several weights together, by the name of the one they shorten on its input.
    """

    site: str
    low_rank: Mapping[str, LossCurve]
    shorter: Mapping[str, LossCurve] = field(default_factory=dict)
    grouped: Mapping[str, LossCurve] = field(default_factory=dict)

    def alone(self, form: Form) -> Mapping[str, LossCurve]:
        """Of a form that takes a weight by itself, by weight name; empty for the others."""
        return {"low_rank": self.low_rank, "grouped": self.grouped}.get(form.kind, {})


def curves_together(sites: Sequence[Site], curves: Sequence[SiteCurves], share: float = 1.0) -> tuple[SiteCurves, ...]:
    """The same curves for sites that ``as_planned`` made of the curves' own, or a share of every loss."""
    low_rank = {name: curve for one in curves for name, curve in one.low_rank.items()}
    shorter = {name: curve for one in curves for name, curve in one.shorter.items()}
    grouped = {name: curve for one in curves for name, curve in one.grouped.items()}
    found = []
    for site in sites:
        names = [weight.name for weight in site.weights]
        of_site = (
            {name: one[name].scaled(share) for name in names if name in one} for one in (low_rank, shorter, grouped)
        )
        found.append(SiteCurves(site.name, *of_site))
    return tuple(found)


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
        cached: numbers that the KV cache keeps of a token, shape ``(n,)``.
        shared: whether the first GEMMs of its fused weights run as one, shape ``(n,)``.
    """

    site: str
    forms: NDArray[np.str_]
    dims: Ints
    params: Ints
    loss: Floats
    latency: Ints
    interpolated: Ints
    cached: Ints
    shared: NDArray[np.bool_]

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
            self.cached[cut],
            self.shared[cut],
        )
