"""The rules at one dim: by what was recorded where it was, else by the dim alone."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from gac.lab.mechanisms.explanation import Cost, Finding, Ran
from gac.lab.mechanisms.recorded import Recorded
from gac.lab.mechanisms.rules import KERNEL_RULE, WAVE_RULE, Rule, Setting, rules_for

REACH = 1024
"""How far from the dim a dim that keeps a rule is looked for."""


@dataclass(frozen=True)
class Judge:
    """The rules that concern an operator's axis, seen from one dim; without a record where there is none."""

    setting: Setting
    recorded: Recorded | None
    dim: int

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return rules_for(self.setting)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Every rule at the dim, in the order of ``rules``."""
        return tuple(self._told(self._finding(rule)) for rule in self.rules)

    @cached_property
    def nearest(self) -> tuple[int | None, int | None]:
        """The nearest dims below and above that break no rule, within reach."""
        return self._nearest(self._sound)

    def at(self, dim: int) -> Setting:
        """The setting with what was recorded at a dim."""
        ran = () if self.recorded is None else self.recorded.launches(dim)
        return replace(self.setting, ran=ran) if ran else self.setting

    def keeps(self, rule: Rule, dim: int) -> bool | None:
        return rule.keeps(dim, self.at(dim))

    def _sound(self, dim: int) -> bool:
        return all(self._fine(rule, dim) for rule in self.rules)

    def _fine(self, rule: Rule, dim: int) -> bool:
        """Whether a dim keeps a rule, or is not under it by its record, or cannot be told where this one cannot."""
        held = self.keeps(rule, dim)
        return held is True or (held is None and (bool(self.at(dim).ran) or self.keeps(rule, self.dim) is None))

    def _nearest(self, sound: Callable[[int], bool]) -> tuple[int | None, int | None]:
        below = next((dim for dim in range(self.dim - 1, max(0, self.dim - REACH), -1) if sound(dim)), None)
        return below, next((dim for dim in range(self.dim + 1, self.dim + REACH) if sound(dim)), None)

    @cached_property
    def _measured(self) -> Cost | None:
        """The cost of all the broken rules together, against a dim that keeps every rule that a larger one keeps."""
        if self.recorded is None:
            return None
        ahead = range(self.dim + 1, self.dim + REACH)
        mendable = [rule for rule in self.rules if any(self.keeps(rule, dim) is True for dim in ahead)]
        return self.recorded.cost(lambda dim: all(self._fine(rule, dim) for rule in mendable), REACH)

    def _finding(self, rule: Rule) -> Finding:
        here = self.at(self.dim)
        holds, detail = rule.keeps(self.dim, here), rule.detail(self.dim, here)
        if holds is not False:
            return Finding(rule, holds, detail, None, None, None)
        below, above = self._nearest(lambda dim: self._fine(rule, dim))
        published = rule.published
        figure = Cost("published", f"{published.cost} ({published.setting}; {published.source})")
        return Finding(rule, holds, detail, below, above, self._measured or figure)

    def _told(self, finding: Finding) -> Finding:
        """What the record adds to a rule of which the dim alone does not tell."""
        if self.recorded is None:
            return finding
        collapse = self.recorded.collapse
        cause = None if collapse is None else collapse.cause
        if finding.rule.name == KERNEL_RULE and collapse is not None and cause and cause.kind == "kernel switch":
            words = f"{collapse.slowdown:.2f}x the latency of {collapse.rescue}"
            cost = Cost("measured", words, collapse.slowdown, collapse.rescue)
            return Finding(finding.rule, False, cause.evidence, None, collapse.rescue, cost)
        waves = "; then ".join(filter(None, map(_waves, self.recorded.ran)))
        return replace(finding, detail=waves) if finding.rule.name == WAVE_RULE and waves else finding


def _waves(ran: Ran) -> str:
    if ran.waves is None:
        return ""
    waves = f"{ran.tiles} tiles in {'' if ran.exact else 'at least '}{ran.waves} wave{'s' if ran.waves > 1 else ''}"
    return waves if ran.last_wave is None else f"{waves}, the last {ran.last_wave:.0%} full"
