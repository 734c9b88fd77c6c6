"""The constraints behind the cliffs: their demand on a dim, the GPUs, the cost of breaking them, and the source.

The contiguous dimension of a matrix counts: for a GEMM k (the rows of both operands) and n (the rows of the result),
never the number of rows m; a low-rank pair's r is n of its first GEMM and k of its second; attention's head_dim is k
of its first GEMM and n of its second. ``rules.toml`` states the rules; ``checks`` tests them.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gac.lab.mechanisms.checks import CHECKS, Check
from gac.lab.mechanisms.setting import Setting, parse_capability


@dataclass(frozen=True)
class Source:
    """Author, title, section (or function) and address of a document."""

    author: str
    title: str
    section: str
    url: str


@dataclass(frozen=True)
class Published:
    """Cost of breaking a rule, in words, on the GPU ``setting``, by ``source``."""

    cost: str
    setting: str
    source: str


@dataclass(frozen=True)
class Rule:
    """One constraint.

    Attributes:
        name: short and unique, for example ``cuBLAS alignment tier``.
        level: the layer that imposes it.
        constraint: its demand, in words.
        since: first compute capability that imposes it.
        sources: its documentation.
        published: cost of breaking it, measured by others.
        check: the axes it applies to, and whether a dim keeps it.
        before: first compute capability that no longer imposes it; None: all later ones do.
    """

    name: str
    level: Literal["framework", "library", "hardware", "memory"]
    constraint: str
    since: str
    sources: tuple[Source, ...]
    published: Published
    check: Check
    before: str | None = None

    def holds_on(self, compute_capability: str) -> bool:
        """True if GPUs of this compute capability impose the rule."""
        capability = parse_capability(compute_capability)
        return parse_capability(self.since) <= capability and (
            self.before is None or capability < parse_capability(self.before)
        )


def rules_for(setting: Setting) -> tuple[Rule, ...]:
    """The rules that apply to an operator's axis in a dtype, on its GPU where one is named."""
    capability = setting.compute_capability
    applying = (rule for rule in RULES if rule.check.applies_to(setting))
    return tuple(rule for rule in applying if capability is None or rule.holds_on(capability))


def _read() -> tuple[Rule, ...]:
    document = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
    sources = {name: Source(**source) for name, source in document["sources"].items()}
    return tuple(
        Rule(
            **rule
            | {
                "sources": tuple(sources[name] for name in rule["sources"]),
                "published": Published(**rule["published"]),
                "check": CHECKS[rule["name"]],
            }
        )
        for rule in document["rules"]
    )


RULES = _read()  # every constraint, from the framework down to memory
