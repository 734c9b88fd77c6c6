"""Which constraints a dim breaks, what each costs, and what ran there."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gac.errors import ProfileError
from gac.lab.mechanisms.axes import element_bytes, natural_axis
from gac.lab.mechanisms.explanation import Collapse, Explanation, Finding
from gac.lab.mechanisms.judge import Judge
from gac.lab.mechanisms.recorded import Recorded
from gac.lab.mechanisms.rules import Setting
from gac.profiling.operators import OPERATORS, Operator
from gac.profiling.records import Header
from gac.profiling.table import Profile


def explain(
    operator: str,
    dim: int,
    profile: Profile | None = None,
    axis: str | None = None,
    fixed: Mapping[str, int] | None = None,
    dtype: str = "bf16",
) -> Explanation:
    """Which constraints a dim breaks, what each costs, and what ran there; recorded kernels take precedence.

    A cost is measured where the profile has this dim and, within reach, a larger one that keeps every rule that any
    larger dim can keep; it is then the cost of all the broken rules together. Else it is the median of the dim's
    alignment class in the sweep; else the published figure.

    Args:
        profile: where costs and kernels are taken from; without one, the rules and published costs alone.
        axis: by default the one that compression moves (a rank, a head_dim, the k of a GEMM).
        fixed: sizes of all the other axes; by default those of the profile's sweep that has most dims, among the
            sweeps that have this one if any does, and of equals the one with the largest sizes.

    Raises:
        ProfileError: the operator, the axis or the dtype is unknown, the dim is below 1, or ``fixed`` does not give the
            other axes.
    """
    axis = natural_axis(operator) if axis is None else axis
    _check(OPERATORS.get(operator), dim, axis, fixed, dtype)
    recorded = None if profile is None else Recorded.of(profile, operator, axis, dtype, dim, fixed)
    judge = Judge(_setting(operator, axis, dtype, None if profile is None else profile.header), recorded, dim)
    others = recorded.sweep.fixed if recorded is not None else tuple((fixed or {}).items())
    return _explanation(judge, others, None if profile is None else profile.header.gpu)


def _explanation(judge: Judge, others: tuple[tuple[str, int], ...], gpu: str | None) -> Explanation:
    setting, recorded = judge.setting, judge.recorded
    collapse = None if recorded is None else recorded.collapse
    latency = None if recorded is None else recorded.latency_ns
    clauses = (_latency(gpu, latency, collapse), _rules(judge.findings, judge.nearest))
    name = f"{setting.operator} {setting.axis}={judge.dim}"
    return Explanation(
        setting.operator,
        setting.axis,
        judge.dim,
        setting.dtype,
        others,
        gpu,
        setting.compute_capability,
        latency,
        () if recorded is None else recorded.ran,
        collapse,
        tuple(sorted(judge.findings, key=_order)),
        f"{name}{f' on {gpu}' if gpu else ''} {'; '.join(filter(None, clauses))}.",
    )


def _order(finding: Finding) -> int:
    return [False, None, True].index(finding.holds)


def _setting(operator: str, axis: str, dtype: str, header: Header | None) -> Setting:
    setting = Setting(operator, axis, dtype, element_bytes(operator, dtype))
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


# --- the sentence ---------------------------------------------------------------------------------------------------


def _latency(gpu: str | None, latency_ns: float | None, collapse: Collapse | None) -> str:
    if latency_ns is None:
        return "" if gpu is None else "was not measured"
    took = f"takes {latency_ns / 1e3:.1f} us"
    if collapse is None:
        return f"{took}, and no larger measured dim is faster"
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
