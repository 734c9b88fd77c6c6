"""What is known about a dim: the records that ``explain`` and ``causes_of`` fill in."""

from dataclasses import dataclass
from typing import Literal

from gac.lab.mechanisms.rules import Rule
from gac.lab.mechanisms.runs import Run

CauseKind = Literal[
    "no kernel", "alignment tier", "template", "extra kernels", "kernel switch", "wave", "row alignment", "tile padding"
]
Basis = Literal["measured", "alignment class", "published"]


@dataclass(frozen=True)
class Cost:
    """What breaking a rule costs.

    Attributes:
        basis: ``measured``: this dim against ``against``, both in the profile; ``alignment class``: the median of the
            profile's dims of the same alignment class; ``published``: somebody else's GPU.
        words: the cost in words, with its setting.
        slowdown: latency over that of the dim or dims compared with; None where only published.
        against: the dim compared with, where measured.
    """

    basis: Basis
    words: str
    slowdown: float | None = None
    against: int | None = None


@dataclass(frozen=True)
class Finding:
    """One rule at one dim.

    Attributes:
        rule: the rule.
        holds: whether the dim keeps it; None where only the recorded kernels could tell.
        detail: the numbers behind it, one clause.
        below: the nearest smaller dim that keeps the rule, or that by the record another backend served; None where
            there is none, or ``holds`` is not False.
        above: the nearest larger one.
        cost: what breaking it costs; None unless broken. A measured cost is that of all the broken rules together.
    """

    rule: Rule
    holds: bool | None
    detail: str
    below: int | None
    above: int | None
    cost: Cost | None


@dataclass(frozen=True)
class Cause:
    """The strongest difference between what ran at a collapsed dim and what ran at its rescue.

    Or between what ran at the edge of a staircase and what ran at the sweet spot before it.

    Attributes:
        kind: ``no kernel``: the kernels of the scheme's storage do not read such a matrix, and others ran; ``alignment
            tier``: a kernel for less aligned operands, or for an older architecture; ``template``: another attention
            backend or head_dim template; ``extra kernels``: copies, paddings or launches that the rescue does without;
            ``kernel switch``: another kernel of the same tier; ``row alignment``: the same kernel on operands whose
            rows lie across more cache lines; ``tile padding``: the same kernel and alignment, less of the tiles used;
            ``wave``: the same kernel in more waves (edges of staircases only).
        evidence: one sentence with the kernels, grids or waves that show it.
        slow: the kernel that ran at the collapsed dim (or edge).
        fast: the kernel that ran in its place at the rescue (or sweet spot); empty where none did.
    """

    kind: CauseKind
    evidence: str
    slow: str
    fast: str


@dataclass(frozen=True)
class Collapse:
    """A larger dim is faster: which, by how much, and the recorded cause (None where the record does not tell)."""

    rescue: int
    slowdown: float
    cause: Cause | None


@dataclass(frozen=True)
class Explanation:
    """What is known about one dim of an operator.

    Attributes:
        operator, axis, dim, dtype: what was asked.
        fixed: sizes of the other axes; empty where no sweep was chosen.
        gpu: the profile's GPU; None without a profile.
        compute_capability: of that GPU; None without a profile (then the rules of every architecture are listed).
        latency_ns: measured at the dim; None where it was not measured.
        ran: the kernels recorded there, in order.
        collapse: None where the dim is not collapsed or was not measured.
        findings: the rules that concern the operator and axis: broken, then untold, then kept.
        summary: one sentence.
    """

    operator: str
    axis: str
    dim: int
    dtype: str
    fixed: tuple[tuple[str, int], ...]
    gpu: str | None
    compute_capability: str | None
    latency_ns: float | None
    ran: tuple[Run, ...]
    collapse: Collapse | None
    findings: tuple[Finding, ...]
    summary: str

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The rules that the dim breaks."""
        return tuple(finding for finding in self.findings if finding.holds is False)
