"""What is known about a dim: the records that ``explain`` fills in."""

from dataclasses import dataclass
from typing import Literal

from gac.lab.mechanisms.causes import Cause
from gac.lab.mechanisms.rules import Rule
from gac.profiling.kernel_names import Kernel

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
class Ran:
    """One kernel that was recorded at the dim.

    Attributes:
        kernel: what its name and grid tell.
        grid: CTAs launched, (x, y, z).
        tiles: output tiles (as many for each share of k where it is split); None where not known.
        waves: in how many waves the SMs work them off; None where not known.
        last_wave: how full the last wave is; None where not known exactly.
        exact: whether ``waves`` is; else it is the fewest, since an SM may hold several CTAs of the kernel.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    tiles: int | None = None
    waves: int | None = None
    last_wave: float | None = None
    exact: bool = True


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
    ran: tuple[Ran, ...]
    collapse: Collapse | None
    findings: tuple[Finding, ...]
    summary: str

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The rules that the dim breaks."""
        return tuple(finding for finding in self.findings if finding.holds is False)
