"""Which constraints a dim breaks, what each costs, and what ran there."""

from collections.abc import Mapping

from gac.errors import ProfileError
from gac.lab.mechanisms.axes import Setting, natural_axis
from gac.lab.mechanisms.explanation import Explanation
from gac.lab.mechanisms.judge import Judge
from gac.lab.mechanisms.recorded import Recorded
from gac.profiling.operators import OPERATORS, Operator
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
    header = None if profile is None else profile.header
    on = () if header is None else (header.compute_capability, header.shared_memory_bytes)
    judge = Judge(Setting(operator, axis, dtype, *on), Recorded.of(profile, operator, axis, dtype, dim, fixed), dim)
    return _explanation(judge, None if header is None else header.gpu)


def _explanation(judge: Judge, gpu: str | None) -> Explanation:
    setting, recorded = judge.setting, judge.recorded
    clauses = (_latency(gpu, recorded), _rules(judge))
    name = f"{setting.operator} {setting.axis}={judge.dim}"
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
        f"{name}{f' on {gpu}' if gpu else ''} {'; '.join(filter(None, clauses))}.",
    )


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
