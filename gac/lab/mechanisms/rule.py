"""A rule: one constraint on a dim, the GPUs on which it holds, and its sources."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gac.lab.mechanisms.axes import ROWS
from gac.lab.mechanisms.tiles import version
from gac.profiling.records import Launch

Level = Literal["framework", "library", "hardware", "memory"]


@dataclass(frozen=True)
class Setting:
    """What a rule needs to know besides the dim.

    Attributes:
        operator: name of the operator.
        axis: the axis that the dim is on.
        dtype: ``bf16``, ``fp16`` or ``fp8``.
        element_bytes: bytes of an element of the matrices that the kernels read.
        compute_capability: ``"9.0"``; None where no GPU is named.
        shared_bytes: shared memory that one CTA may have; None where not known.
        ran: what was recorded at the dim, in order; empty where nothing was.
    """

    operator: str
    axis: str
    dtype: str
    element_bytes: int
    compute_capability: str | None = None
    shared_bytes: int | None = None
    ran: tuple[Launch, ...] = ()

    @property
    def sides(self) -> str:
        """Whether the axis is ``k`` or ``n`` of a GEMM, or both; empty where it only counts rows."""
        return ROWS.get((self.operator, self.axis), "")


@dataclass(frozen=True)
class Source:
    """Where a statement can be read: author, title, section (or function) and address."""

    author: str
    title: str
    section: str
    url: str


@dataclass(frozen=True)
class Published:
    """What breaking a rule cost elsewhere: ``cost`` in words, ``setting`` (GPU), ``source``."""

    cost: str
    setting: str
    source: str


@dataclass(frozen=True)
class Rule:
    """One constraint.

    Attributes:
        name: short, unique; for example ``cuBLAS alignment tier``.
        level: who imposes it.
        constraint: what it asks, in words.
        concerns: whether it is about an operator's axis in a dtype.
        keeps: whether a dim keeps it; None where the dim alone does not tell (the recorded kernels do).
        detail: the numbers behind that, for example ``rows of 214 bytes: loads of 2 bytes``.
        since: first compute capability on which it holds.
        before: first compute capability on which it holds no more; None: still holds.
        sources: where it is documented.
        published: what breaking it cost elsewhere.
        aliases: other names for the mechanism.
    """

    name: str
    level: Level
    constraint: str
    concerns: Callable[[Setting], bool]
    keeps: Callable[[int, Setting], bool | None]
    detail: Callable[[int, Setting], str]
    since: str
    sources: tuple[Source, ...]
    published: Published
    before: str | None = None
    aliases: tuple[str, ...] = ()

    def holds_on(self, compute_capability: str) -> bool:
        """Whether GPUs of this compute capability impose it."""
        here = version(compute_capability)
        return version(self.since) <= here and (self.before is None or here < version(self.before))
