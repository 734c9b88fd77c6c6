"""Which constraints a dim breaks, what each costs, and what ran there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gac.errors import ProfileError
from gac.profiling.mechanisms.axes import natural_axis
from gac.profiling.mechanisms.explanation import Collapse, Cost, Explanation, Finding, Ran
from gac.profiling.mechanisms.recorded import Recorded
from gac.profiling.mechanisms.rules import KERNEL_RULE, WAVE_RULE, Rule, Setting, rules_for
from gac.profiling.operators import ITEM_BYTES, Operator, operator_named
from gac.profiling.records import Header
from gac.profiling.table import Profile

__all__ = ["Collapse", "Cost", "Explanation", "Finding", "Ran", "explain"]

_REACH = 1024
"""How far from the dim a dim that keeps a rule is looked for."""

_TOLD_BY = {"kernel switch": KERNEL_RULE, "wave": WAVE_RULE}
"""The rules that a dim alone cannot break, by the recorded cause that shows it did."""


def explain(
    operator: str,
    dim: int,
    profile: Profile | None = None,
    axis: str | None = None,
    fixed: Mapping[str, int] | None = None,
    dtype: str = "bf16",
) -> Explanation:
    """Which constraints a dim breaks, what each costs, and what ran there.

    A cost is measured where the profile has this dim and a larger one that keeps every rule that any larger dim within
    reach can keep; it is then the cost of all the broken rules together. Else it is the median of the dim's alignment
    class in the sweep; else the published figure.

    Args:
        operator: a name in ``gac.profiling.operators.OPERATORS``.
        dim: size of ``axis``.
        profile: where costs and kernels are taken from; without one, the rules and published costs alone.
        axis: by default the one that compression moves (a rank, a head_dim, the k of a GEMM).
        fixed: sizes of all the other axes; by default those of the profile's sweep that has most dims, among the
            sweeps that have this one if any does, and of equals the one with the largest sizes.
        dtype: ``bf16``, ``fp16`` or ``fp8``.

    Raises:
        ProfileError: the operator, the axis or the dtype is unknown, the dim is below 1, or ``fixed`` does not give the
            other axes.
    """
    known = operator_named(operator)
    axis = natural_axis(operator) if axis is None else axis
    _check(known, dim, axis, fixed, dtype)
    recorded = None if profile is None else Recorded.of(profile, operator, axis, dtype, dim, fixed)
    header = None if profile is None else profile.header
    setting = _setting(operator, axis, dtype, header)
    rules = rules_for(setting)
    cost = None if recorded is None else recorded.cost(_sound(rules, dim, setting))
    ran = () if recorded is None else recorded.ran
    collapse = None if recorded is None else recorded.collapse
    findings = [_told(_finding(rule, dim, setting, cost), ran, collapse) for rule in rules]
    latency = None if recorded is None else recorded.latency_ns
    gpu = None if header is None else header.gpu
    clauses = (_latency(gpu, latency, collapse), _rules(findings, _nearest(_unbroken(rules, dim, setting), dim)))
    return Explanation(
        operator,
        axis,
        dim,
        dtype,
        recorded.sweep.fixed if recorded is not None else tuple((fixed or {}).items()),
        gpu,
        setting.compute_capability,
        latency,
        ran,
        collapse,
        tuple(sorted(findings, key=_order)),
        f"{operator} {axis}={dim}{f' on {gpu}' if gpu else ''} {'; '.join(filter(None, clauses))}.",
    )


def _setting(operator: str, axis: str, dtype: str, header: Header | None) -> Setting:
    setting = Setting(operator, axis, dtype, ITEM_BYTES[dtype])
    if header is None:
        return setting
    limit = header.shared_memory_bytes
    return replace(setting, compute_capability=header.compute_capability, shared_bytes=limit)


def _check(operator: Operator, dim: int, axis: str, fixed: Mapping[str, int] | None, dtype: str) -> None:
    name = operator.name
    if dim < 1:
        raise ProfileError(f"dim {dim} of {name}", "a size of at least 1", "Correct the dim.")
    if axis not in operator.axes:
        axes = ", ".join(operator.axes)
        raise ProfileError(f"axis {axis!r} of {name}", f"one of {axes}", "Name one of the operator's axes.")
    if dtype not in operator.dtypes:
        dtypes = ", ".join(operator.dtypes)
        raise ProfileError(f"dtype {dtype!r} of {name}", f"one of {dtypes}", "Name one of the operator's dtypes.")
    others = [other for other in operator.axes if other != axis]
    if fixed is not None and set(fixed) != set(others):
        raise ProfileError(
            f"{name} along {axis} with {', '.join(fixed) or 'no axis'} fixed",
            f"sizes for {', '.join(others)}",
            "Give every other axis a size, or none for the largest sweep.",
        )


# --- rules ----------------------------------------------------------------------------------------------------------


def _finding(rule: Rule, dim: int, setting: Setting, cost: Cost | None) -> Finding:
    holds = rule.keeps(dim, setting)
    detail = rule.detail(dim, setting)
    if holds is not False:
        return Finding(rule, holds, detail, None, None, None)
    below, above = _nearest(lambda other: rule.keeps(other, setting) is True, dim)
    published = rule.published
    figure = Cost("published", f"{published.cost} ({published.setting}; {published.source})")
    return Finding(rule, holds, detail, below, above, cost or figure)


def _told(finding: Finding, ran: Sequence[Ran], collapse: Collapse | None) -> Finding:
    """What the record adds to a rule of which the dim alone does not tell."""
    cause = None if collapse is None else collapse.cause
    name = finding.rule.name
    if collapse is not None and cause is not None and _TOLD_BY.get(cause.kind) == name:
        words = f"{collapse.slowdown:.2f}x the latency of {collapse.rescue}"
        cost = Cost("measured", words, collapse.slowdown, collapse.rescue)
        return Finding(finding.rule, False, cause.evidence, None, collapse.rescue, cost)
    waves = [
        f"{one.tiles} tiles in {one.waves} wave{'s' if one.waves > 1 else ''}, the last {one.last_wave:.0%} full"
        for one in ran
        if one.kernel.main and one.waves is not None and one.last_wave is not None
    ]
    if name == WAVE_RULE and waves:
        return Finding(finding.rule, None, "; then ".join(waves), None, None, None)
    return finding


def _sound(rules: Sequence[Rule], dim: int, setting: Setting) -> Callable[[int], bool]:
    """Whether a dim keeps every rule that some larger dim keeps (attention's tiles only ever get smaller)."""
    ahead = range(dim + 1, dim + _REACH)
    mendable = [rule for rule in rules if any(rule.keeps(other, setting) is True for other in ahead)]
    return lambda other: all(rule.keeps(other, setting) is True for rule in mendable)


def _unbroken(rules: Sequence[Rule], dim: int, setting: Setting) -> Callable[[int], bool]:
    """Whether a dim keeps every rule; what cannot be told of either dim does not count."""
    told = [rule for rule in rules if rule.keeps(dim, setting) is not None]
    silent = [rule for rule in rules if rule.keeps(dim, setting) is None]
    return lambda other: (
        all(rule.keeps(other, setting) is True for rule in told)
        and not any(rule.keeps(other, setting) is False for rule in silent)
    )


def _nearest(keeps: Callable[[int], bool], dim: int) -> tuple[int | None, int | None]:
    """The nearest dims below and above that keep it, within reach."""
    below = next((other for other in range(dim - 1, max(0, dim - _REACH), -1) if keeps(other)), None)
    return below, next((other for other in range(dim + 1, dim + _REACH) if keeps(other)), None)


def _order(finding: Finding) -> int:
    return [False, None, True].index(finding.holds)


# --- the sentence ---------------------------------------------------------------------------------------------------


def _latency(gpu: str | None, latency_ns: float | None, collapse: Collapse | None) -> str:
    if latency_ns is None:
        return "" if gpu is None else "was not measured"
    took = f"takes {latency_ns / 1e3:.1f} us"
    if collapse is None:
        return f"{took}, and no larger dim is faster"
    because = "" if collapse.cause is None else f" ({collapse.cause.kind}: {collapse.cause.evidence})"
    return f"{took}, {collapse.slowdown:.2f}x as long as {collapse.rescue}{because}"


def _rules(findings: Sequence[Finding], nearest: tuple[int | None, int | None]) -> str:
    if not findings:
        return "is under no rule"
    broken = [finding.rule.name for finding in findings if finding.holds is False]
    if not broken:
        return "breaks no rule"
    sound = " and ".join(str(dim) for dim in nearest if dim is not None)
    remedy = f"; the nearest that break none: {sound}" if sound else ""
    return f"breaks {len(broken)} of {len(findings)} rules ({', '.join(broken)}){remedy}"
