"""The constraints behind the cliffs: what each asks of a dim, on which GPUs, what breaking it costs, who says so.

What matters is the contiguous dimension of a matrix: for a GEMM k (the rows of both operands) and n (the rows of the
result), never the number of rows m; a low-rank pair's r is n of its first GEMM and k of its second; attention's
head_dim is k of its first GEMM and n of its second. ``rules.toml`` has what the rules say; here is how each is checked.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal

from gac.lab.mechanisms import checks, flash, stored
from gac.lab.mechanisms.axes import Setting, version
from gac.lab.mechanisms.sectors import SECTOR, VECTOR

KERNEL_RULE = "cuBLAS heuristic"
"""The rule that a recorded kernel switch breaks."""

WAVE_RULE = "CTA wave quantisation"
"""A rule of which only a record tells."""

Level = Literal["framework", "library", "hardware", "memory"]
Concerns = Callable[[Setting], bool]
Keeps = Callable[[int, Setting], bool | None]
Detail = Callable[[int, Setting], str]


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
    """

    name: str
    level: Level
    constraint: str
    concerns: Concerns
    keeps: Keeps
    detail: Detail
    since: str
    sources: tuple[Source, ...]
    published: Published
    before: str | None = None

    def holds_on(self, compute_capability: str) -> bool:
        """Whether GPUs of this compute capability impose it."""
        here = version(compute_capability)
        return version(self.since) <= here and (self.before is None or here < version(self.before))


def rules_for(setting: Setting) -> tuple[Rule, ...]:
    """The rules that concern an operator's axis in a dtype, on its GPU where one is named."""
    capability = setting.compute_capability
    return tuple(rule for rule in RULES if rule.concerns(setting) and (capability is None or rule.holds_on(capability)))


def _of_flash(keeps: Keeps, say: Detail) -> tuple[Concerns, Keeps, Detail]:
    """A rule of FlashAttention-2; it says nothing of a dim that another backend served."""
    other = flash.other_backend
    return (
        checks.head_dim("", "flash"),
        lambda dim, setting: None if other(setting) else keeps(dim, setting),
        lambda dim, setting: f"{other(setting)} served it" if other(setting) else say(dim, setting),
    )


_CHECKS: Mapping[str, tuple[Concerns, Keeps, Detail]] = MappingProxyType(
    {
        "SDPA backend selection": (
            checks.head_dim("", "flash", "efficient", "cudnn"),
            checks.multiple_of(8),
            checks.say_backend,
        ),
        "FlashAttention-2 template": _of_flash(flash.is_template, flash.say_template),
        "FlashAttention-2 padding waste": _of_flash(flash.little_padding, flash.say_template),
        "scheme operator": (stored.refuses, stored.runs, stored.say_runs),
        "scheme kernel": (stored.reads, stored.is_read, stored.say_read),
        "scheme groups": (stored.groups, stored.in_whole_groups, stored.say_groups),
        "latent kernel": (checks.latents, checks.attended, checks.say_latents),
        "cuBLAS alignment tier": (checks.gemm_rows, checks.aligned_rows(VECTOR), checks.say_tier),
        KERNEL_RULE: (
            checks.gemm,
            checks.untold,
            lambda *_: "which kernel the library chooses shows in the recorded names only",
        ),
        "vectorised access": (checks.rows, checks.aligned_rows(VECTOR), checks.say_vector),
        "Tensor Core tile": (checks.tensor_core_rows, checks.whole_mma, checks.say_mma),
        "L2 sector": (checks.rows, checks.aligned_rows(SECTOR), checks.say_sector),
        WAVE_RULE: (
            lambda setting: setting.operator != "copy",
            checks.untold,
            lambda *_: "the number of tiles follows from the kernel's tile, so it shows in the record only",
        ),
        "cp.async": (checks.rows, checks.aligned_rows(VECTOR), checks.say_async),
        "TMA alignment": (checks.tma_rows, checks.aligned_rows(VECTOR), checks.say_rows),
        "WGMMA tile": (
            lambda setting: checks.tma_rows(setting) and "n" in setting.sides,
            checks.multiple_of(8),
            lambda dim, _: f"{dim} % 8 = {dim % 8}: {-dim % 8} of padding",
        ),
        "FP8 packing": (
            lambda setting: setting.dtype == "fp8" and checks.rows(setting),
            checks.multiple_of(16),
            lambda dim, _: f"{dim} % 16 = {dim % 16}",
        ),
        "shared-memory tile budget": _of_flash(flash.fitting_tile, flash.say_budget),
        "shared-memory banks": (checks.head_dim("", "flash", "efficient", "cudnn"), checks.untold, flash.say_banks),
    }
)
"""Of each rule: which axes it concerns, whether a dim keeps it, and the numbers behind that."""


def _read() -> tuple[Rule, ...]:
    document = tomllib.loads((files("gac.lab.mechanisms") / "rules.toml").read_text(encoding="utf-8"))
    sources = {name: Source(**source) for name, source in document["sources"].items()}
    return tuple(_rule(sources, rule) for rule in document["rules"])


def _rule(documented: Mapping[str, Source], said: dict[str, Any]) -> Rule:
    concerns, keeps, detail = _CHECKS[said["name"]]
    said |= {"concerns": concerns, "keeps": keeps, "detail": detail, "published": Published(**said["published"])}
    return Rule(**said | {"sources": tuple(documented[name] for name in said["sources"])})


RULES = _read()
"""Every constraint, from the framework down to memory."""
