"""Which constraints a dim breaks, what each costs, and what ran there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from gac.core.arguments import checked
from gac.core.errors import ProfileError
from gac.lab.mechanisms.axes import Setting, natural_axis
from gac.lab.mechanisms.explanation import Cost, Explanation, Finding
from gac.lab.mechanisms.recorded import Recorded
from gac.lab.mechanisms.rules import KERNEL_RULE, WAVE_RULE, Rule, rules_for
from gac.lab.mechanisms.runs import Waves
from gac.profiling.operators import OPERATORS, Operator
from gac.profiling.table import Profile

REACH = 1024
"""How far from the dim a dim that keeps a rule is looked for."""


@checked
def explain(
    operator: str,
    dim: int,
    profile: Profile | str | Path | None = None,
    axis: str | None = None,
    fixed: Mapping[str, int] | None = None,
    dtype: str = "bf16",
) -> Explanation:
    """Which constraints a dim breaks, what each costs, and what ran there; recorded kernels take precedence.

    A cost is measured where the profile has this dim and, within reach, a larger one that keeps every rule that any
    larger dim can keep; it is then the cost of all the broken rules together. Else it is the median of the dim's
    alignment class in the sweep; else the published figure.

    Args:
        profile: where costs and kernels are taken from, or its name or path; without one, the rules and published
            costs alone.
        axis: by default the one that compression moves (a rank, a head_dim, the k of a GEMM).
        fixed: sizes of all the other axes; by default those of the profile's sweep that has most dims, among the
            sweeps that have this one if any does, and of equals the one with the largest sizes.

    Raises:
        ProfileError: the operator, the axis or the dtype is unknown, the dim is below 1, or ``fixed`` does not give the
            other axes.
    """
    profile = None if profile is None else Profile.opened(profile)
    axis = natural_axis(operator) if axis is None else axis
    _check(OPERATORS.get(operator), dim, axis, fixed, dtype)
    header = None if profile is None else profile.header
    on = () if header is None else (header.compute_capability, header.shared_memory_bytes)
    recorded = Recorded.of(profile, operator, axis, dtype, dim, fixed)
    judge = Judge(replace(Setting(operator, axis, dtype, *on), fixed=recorded.sweep.fixed), recorded, dim)
    return _explanation(judge, None if header is None else header.gpu)


def _explanation(judge: "Judge", gpu: str | None) -> Explanation:
    setting, recorded = judge.setting, judge.recorded
    clauses = filter(None, (_latency(gpu, recorded), _rules(judge)))
    return Explanation(
        setting.operator,
        setting.axis,
        judge.dim,
        setting.dtype,
        recorded.sweep.fixed,
        gpu,
        setting.compute_capability,
        recorded.latency_ns,
        recorded.ran,
        recorded.collapse,
        tuple(sorted(judge.findings, key=lambda finding: [False, None, True].index(finding.holds))),
        f"{setting.operator} {setting.axis}={judge.dim}{f' on {gpu}' if gpu else ''} {'; '.join(clauses)}.",
    )


def _check(operator: Operator, dim: int, axis: str, fixed: Mapping[str, int] | None, dtype: str) -> None:
    name = operator.name
    if dim < 1:
        raise ProfileError(f"dim {dim} of {name}", "a size of at least 1", "Correct the dim.")
    if axis not in operator.axes:
        axes = ", ".join(operator.axes)
        raise ProfileError(f"axis {axis!r} of {name}", f"one of {axes}", "Name one of the operator's axes.")
    if not operator.takes(dtype):
        dtypes = ", ".join(operator.dtypes) + (", or that of a scheme with a storage" if operator.stored else "")
        raise ProfileError(f"dtype {dtype!r} of {name}", f"one of {dtypes}", "Name one of the operator's dtypes.")
    others = [other for other in operator.axes if other != axis]
    if fixed is not None and set(fixed) != set(others):
        raise ProfileError(
            f"{name} along {axis} with {', '.join(fixed) or 'no axis'} fixed",
            f"sizes for {', '.join(others)}",
            "Give every other axis a size, or none for the largest sweep.",
        )


# --- the rules --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judge:
    """The rules that concern an operator's axis, seen from one dim: by its record, else by the dim alone."""

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


# --- the sentence ---------------------------------------------------------------------------------------------------


def _latency(gpu: str | None, recorded: Recorded) -> str:
    if recorded.latency_ns is None:
        return "" if gpu is None else "was not measured"
    took, collapse = f"takes {recorded.latency_ns / 1e3:.1f} us", recorded.collapse
    if collapse is None:
        return f"{took}, and no larger measured dim is faster"
    because = "" if collapse.cause is None else f" ({collapse.cause.kind}: {collapse.cause.evidence})"
    return f"{took}, {collapse.slowdown:.2f}x as long as {collapse.rescue}{because}"


def _rules(judge: Judge) -> str:
    if not judge.findings:
        return "is under no rule"
    broken = [finding.rule.name for finding in judge.findings if finding.holds is False]
    if not broken:
        return "breaks no rule"
    sound = " and ".join(str(dim) for dim in judge.nearest if dim is not None)
    remedy = f"; the nearest that break none: {sound}" if sound else ""
    return f"breaks {len(broken)} of {len(judge.findings)} rules ({', '.join(broken)}){remedy}"
