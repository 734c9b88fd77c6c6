"""The constraints behind the cliffs: what each asks of a dim, on which GPUs, what breaking it costs, who says so.

What matters is the contiguous dimension of a matrix: for a GEMM k (the rows of both operands) and n (the rows of the
result), never the number of rows m; a low-rank pair's r is n of its first GEMM and k of its second; attention's
head_dim is k of its first GEMM and n of its second. ``rules.toml`` has what the rules say; here is how each is checked.
"""

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from gac.lab.mechanisms import checks, flash
from gac.lab.mechanisms.rule import Level, Published, Rule, Setting, Source
from gac.lab.mechanisms.sectors import SECTOR, VECTOR

__all__ = ["RULES", "Level", "Published", "Rule", "Setting", "rule_named", "rules_for"]

KERNEL_RULE = "cuBLAS heuristic"
"""The rule that a recorded kernel switch breaks."""

WAVE_RULE = "CTA wave quantisation"
"""A rule of which only a record tells."""


def rule_named(name: str) -> Rule | None:
    """The rule of this name or alias; None where there is none."""
    return next((rule for rule in RULES if name in (rule.name, *rule.aliases)), None)


def rules_for(setting: Setting) -> tuple[Rule, ...]:
    """The rules that concern an operator's axis in a dtype, on its GPU where one is named."""
    capability = setting.compute_capability
    return tuple(rule for rule in RULES if rule.concerns(setting) and (capability is None or rule.holds_on(capability)))


_CHECKS: Mapping[str, tuple[Any, Any, Any]] = MappingProxyType(
    {
        "SDPA backend selection": (
            checks.head_dim("", "flash", "efficient", "cudnn"),
            checks.multiple_of_8,
            checks.say_backend,
        ),
        "FlashAttention-2 template": (checks.head_dim("", "flash"), flash.is_template, flash.say_template),
        "FlashAttention-2 padding waste": (checks.head_dim("", "flash"), flash.little_padding, flash.say_template),
        "cuBLAS alignment tier": (checks.gemm_rows, checks.aligned_rows(VECTOR), checks.say_tier),
        KERNEL_RULE: (checks.gemm, checks.untold, checks.say_kernel),
        "vectorised access": (checks.rows, checks.aligned_rows(VECTOR), checks.say_vector),
        "Tensor Core tile": (checks.tensor_core_rows, checks.whole_mma, checks.say_mma),
        "L2 sector": (checks.rows, checks.aligned_rows(SECTOR), checks.say_sector),
        WAVE_RULE: (checks.launched, checks.untold, checks.say_waves),
        "cp.async": (checks.rows, checks.aligned_rows(VECTOR), checks.say_async),
        "TMA alignment": (checks.tma_rows, checks.aligned_rows(VECTOR), checks.say_rows),
        "WGMMA tile": (checks.wgmma_rows, checks.multiple_of_8, checks.say_wgmma),
        "FP8 packing": (checks.fp8, checks.multiple_of_16, checks.say_fp8),
        "shared-memory tile budget": (checks.head_dim("", "flash"), flash.fitting_tile, flash.say_budget),
        "shared-memory banks": (checks.head_dim("", "flash", "efficient", "cudnn"), checks.untold, flash.say_banks),
    }
)
"""Of each rule: which axes it concerns, whether a dim keeps it, and the numbers behind that."""


def _read() -> tuple[Rule, ...]:
    document = tomllib.loads((files("gac.lab.mechanisms") / "rules.toml").read_text(encoding="utf-8"))
    sources = {name: Source(**source) for name, source in document["sources"].items()}
    return tuple(_rule(sources, rule) for rule in document["rules"])


def _rule(documented: Mapping[str, Source], said: dict[str, Any]) -> Rule:
    said |= dict(zip(("concerns", "keeps", "detail"), _CHECKS[said["name"]], strict=True))
    said |= {"aliases": tuple(said.get("aliases", ())), "published": Published(**said["published"])}
    return Rule(**said | {"sources": tuple(documented[name] for name in said["sources"])})


RULES = _read()
"""Every constraint, from the framework down to memory."""
