"""The rules at one dim: by what was recorded where it was, else by the dim alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gac.lab.mechanisms.axes import Setting
from gac.lab.mechanisms.explanation import Cost, Finding
from gac.lab.mechanisms.recorded import Recorded
from gac.lab.mechanisms.rules import KERNEL_RULE, WAVE_RULE, Rule, rules_for
from gac.lab.mechanisms.waves import Waves

REACH = 1024
"""How far from the dim a dim that keeps a rule is looked for."""


@dataclass(frozen=True)
class Judge:
    """The rules that concern an operator's axis, seen from one dim."""

    setting: Setting
    recorded: Recorded
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
        return self._nearest(self.rules)

    def at(self, dim: int) -> Setting:
        """The setting with what was recorded at a dim."""
        ran = self.recorded.launches(dim)
        return replace(self.setting, ran=ran) if ran else self.setting

    def keeps(self, rule: Rule, dim: int) -> bool | None:
        return rule.keeps(dim, self.at(dim))

    def _sound(self, rules: Sequence[Rule], dim: int) -> bool:
        """Whether a dim keeps rules, or is not under them by its record, or cannot be told where this one cannot."""
        told = bool(self.at(dim).ran)
        return all(
            held is True or (held is None and (told or self.keeps(rule, self.dim) is None))
            for rule, held in ((rule, self.keeps(rule, dim)) for rule in rules)
        )

    def _nearest(self, rules: Sequence[Rule]) -> tuple[int | None, int | None]:
        below, above = range(self.dim - 1, max(0, self.dim - REACH), -1), range(self.dim + 1, self.dim + REACH)
        one, other = (next((dim for dim in dims if self._sound(rules, dim)), None) for dims in (below, above))
        return one, other

    @cached_property
    def _measured(self) -> Cost | None:
        """The cost of all the broken rules together, against a dim that keeps every rule that a larger one keeps."""
        ahead = range(self.dim + 1, self.dim + REACH)
        mendable = [rule for rule in self.rules if any(self.keeps(rule, dim) is True for dim in ahead)]
        return self.recorded.cost(lambda dim: self._sound(mendable, dim), REACH)

    def _finding(self, rule: Rule) -> Finding:
        here = self.at(self.dim)
        holds, detail = rule.keeps(self.dim, here), rule.detail(self.dim, here)
        if holds is not False:
            return Finding(rule, holds, detail, None, None, None)
        below, above = self._nearest([rule])
        published = rule.published
        figure = Cost("published", f"{published.cost} ({published.setting}; {published.source})")
        return Finding(rule, holds, detail, below, above, self._measured or figure)

    def _told(self, finding: Finding) -> Finding:
        """What the record adds to a rule of which the dim alone does not tell."""
        collapse = self.recorded.collapse
        cause = None if collapse is None else collapse.cause
        if finding.rule.name == KERNEL_RULE and collapse is not None and cause and cause.kind == "kernel switch":
            words = f"{collapse.slowdown:.2f}x the latency of {collapse.rescue}"
            cost = Cost("measured", words, collapse.slowdown, collapse.rescue)
            return Finding(finding.rule, False, cause.evidence, None, collapse.rescue, cost)
        waves = "; then ".join(_words(ran.waves) for ran in self.recorded.ran if ran.waves is not None)
        return replace(finding, detail=waves) if finding.rule.name == WAVE_RULE and waves else finding


def _words(waves: Waves) -> str:
    bound = "" if waves.exact else "at least "
    last = "" if waves.last is None else f", the last {waves.last:.0%} full"
    return f"{waves.tiles} tiles in {bound}{waves.count} wave{'s' if waves.count > 1 else ''}{last}"
