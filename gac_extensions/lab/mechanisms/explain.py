"""Explain a dim: the constraints that it breaks, the cost of each, and the kernels that ran there."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np

from gac.core.arguments import checked
from gac.core.arrays import COARSEST_CLASS
from gac.core.errors import ProfileError
from gac.profiling.operators import OPERATORS
from gac.profiling.operators.base import Operator
from gac.profiling.records import Header, Launch
from gac.profiling.table import Profile, Sweep, other_tables
from gac_extensions.lab.cliffs import Cliffs, find_cliffs
from gac_extensions.lab.mechanisms.causes import Cause, Run, cause_between, runs_of
from gac_extensions.lab.mechanisms.rules import Judgement, Rule, Setting, rules_for

REACH = 1024  # A dim that keeps a rule is looked for less than this far away


@dataclass(frozen=True)
class Cost:
    """Cost of breaking a rule, in words with its setting; the slowdown is None where others published it.

    ``measured`` is this dim relative to ``against``, both in the profile; ``alignment class`` the median of the
    profile's dims of the same alignment class.
    """

    basis: Literal["measured", "alignment class", "published"]
    words: str
    slowdown: float | None = None
    against: int | None = None


@dataclass(frozen=True)
class Finding:
    """One rule at one dim, with the numbers behind it in one clause.

    Attributes:
        holds: True where the dim keeps it; None where only the recorded kernels could tell.
        below, above: of a broken rule the nearest dims that keep it, or that by the record another backend served.
        cost: None unless broken. A measured cost is that of all the broken rules.
    """

    rule: Rule
    holds: bool | None
    detail: str
    below: int | None = None
    above: int | None = None
    cost: Cost | None = None


@dataclass(frozen=True)
class Collapse:
    """A larger dim is faster: which, by how much, and the recorded cause (None where the record does not tell)."""

    rescue: int
    slowdown: float
    cause: Cause | None


@dataclass(frozen=True)
class Explanation:
    """All that is known about one dim of an operator.

    Attributes:
        fixed: sizes of the other axes; empty where no sweep was chosen.
        gpu, compute_capability: the profile's; None without a profile (then the rules of every GPU are listed).
        latency_ns, collapse: None where the dim was not measured, or is not collapsed.
        ran: the kernels recorded there, in order.
        findings: the rules that apply to the operator and axis: broken, then unknown, then kept.
    """

    operator: str
    axis: str
    dim: int
    dtype: str
    fixed: tuple[tuple[str, int], ...]
    gpu: str | None
    compute_capability: str | None
    latency_ns: float | None
    ran: tuple[Run, ...]
    collapse: Collapse | None
    findings: tuple[Finding, ...]
    summary: str

    @property
    def broken(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.holds is False)


@checked
def explain(
    operator: str,
    dim: int,
    profile: Profile | str | Path | None = None,
    axis: str | None = None,
    fixed: Mapping[str, int] | None = None,
    dtype: str = "bf16",
) -> Explanation:
    """Explain a dim: the constraints that it breaks, the cost of each, and the recorded kernels, which take precedence.

    A cost is measured where the profile has this dim and, within reach, a larger one that keeps every rule that any
    larger dim can keep; it is then the cost of all the broken rules. Else it is the median of the dim's alignment class
    in the sweep; else the published figure.

    Args:
        profile: source of costs and kernels, or its name or path; without one, the rules and published costs alone.
        axis: by default the one that compression moves (a rank, a head_dim, the k of a GEMM).
        fixed: sizes of all the other axes; by default those of the profile's sweep that has most dims, among the
            sweeps that have this one if any does, and of equals the one with the largest sizes.

    Raises:
        ProfileError: the operator, the axis or the dtype is unknown, the dim is below 1, or ``fixed`` does not give the
            other axes.
    """
    profile = None if profile is None else Profile.opened(profile)
    axis = OPERATORS.get(operator).compressed_axis if axis is None else axis
    _check(OPERATORS.get(operator), dim, axis, fixed, dtype)
    sweep = _sweep(profile, operator, axis, dtype, dim, fixed)
    header = None if profile is None else profile.header
    inspection = _Inspection(sweep, dim, header, "" if profile is None else _not_measured(profile, sweep, dim))
    gpu, capability = (None, None) if header is None else (header.gpu, header.compute_capability)
    state = inspection.latency_ns, inspection.runs, inspection.collapse, inspection.findings, inspection.summary
    return Explanation(operator, axis, dim, dtype, sweep.fixed, gpu, capability, *state)


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


def _sweep(
    profile: Profile | None, operator: str, axis: str, dtype: str, dim: int, fixed: Mapping[str, int] | None
) -> Sweep:
    """Return the sweep with these other axes, maybe empty; by default that with most dims, preferably with this dim."""
    counts, with_dim = Counter[tuple[tuple[str, int], ...]](), set()
    for row in profile.measurements if profile is not None and fixed is None else ():
        if (row.operator, row.dtype, row.cache) == (operator, dtype, "cold") and row.error is None:
            others = tuple((name, size) for name, size in row.shape.items() if name != axis)
            counts[others] += 1
            if row.shape[axis] == dim:
                with_dim.add(others)
    if counts:
        fullest = max(counts, key=lambda axes: (axes in with_dim, counts[axes], prod(size for _, size in axes)))
        fixed = dict(fullest)
    if profile is None or fixed is None:
        none = np.array([])
        return Sweep(operator, dtype, "cold", axis, tuple((fixed or {}).items()), none.astype(int), none, none, ())
    return profile.rows_of(operator, fixed, axis, dtype)


def _not_measured(profile: Profile, sweep: Sweep, dim: int) -> str:
    """The clause of a dim that was not measured: its latency as plans look it up, and the source of that.

    Where it is unknown, the shipped table that has it is named.
    """
    operator, dtype = sweep.operator, sweep.dtype
    if not profile.measured_in(operator, dtype):
        return f"is unknown: the table has no {operator} in {dtype}{_elsewhere(profile, sweep, dim)}"
    if (known := _looked_up(profile, sweep, dim)) is not None:
        source, ns = known
        return f"was not measured: {source}, {ns / 1e3:.1f} us"
    axes = OPERATORS.get(operator).axes
    shape = tuple((dict(sweep.fixed) | {sweep.axis: dim})[axis] for axis in axes)
    gap = f"{profile.model.gap(operator, dtype, axes, shape)}{_elsewhere(profile, sweep, dim)}"
    return f"was not measured, and its latency is unknown: {gap}"


def _looked_up(profile: Profile, sweep: Sweep, dim: int) -> tuple[str, int] | None:
    """The latency of a dim as plans look it up, in ns, and its source; None where it is unknown."""
    along = sweep.operator, dict(sweep.fixed), sweep.axis, np.array([dim]), sweep.dtype
    ns, measured = profile.latency(*along)
    if ns[0] > 0:
        return "measured" if measured[0] else "interpolated", int(ns[0])
    modelled = int(profile.modelled(*along)[0])
    return ("modelled", modelled) if modelled > 0 else None


def _elsewhere(profile: Profile, sweep: Sweep, dim: int) -> str:
    """The shipped table that has a latency, to follow why another one lacks it.

    Without sizes of the other axes any table will do that has the operator in this dtype.
    """
    for table in other_tables(profile):
        if table.measured_in(sweep.operator, sweep.dtype) and (not sweep.fixed or _looked_up(table, sweep, dim)):
            return f"; the shipped table {table.path.stem}, of {table.header.gpu}, has it"
    return ""


class _Inspection:
    """One dim, which the sweep need not have, under the rules that apply to the sweep's axis.

    ``not_measured`` is the clause for a dim that the sweep lacks.
    """

    def __init__(self, sweep: Sweep, dim: int, header: Header | None, not_measured: str) -> None:
        self.sweep, self.dim, self.header, self.not_measured = sweep, dim, header, not_measured
        gpu = () if header is None else (header.compute_capability, header.shared_memory_bytes)
        self.setting = replace(Setting(sweep.operator, sweep.axis, sweep.dtype, *gpu), fixed=sweep.fixed)
        self.rules = rules_for(self.setting)
        self.launches: dict[int, tuple[Launch, ...]] = dict(zip(sweep.dims.tolist(), sweep.launches, strict=True))
        self.latency_ns: float | None = dict(zip(sweep.dims.tolist(), sweep.ns.tolist(), strict=True)).get(dim)
        self.runs = runs_of(sweep, dim, header) if dim in self.launches and header is not None else ()

    @cached_property
    def cliffs(self) -> Cliffs:
        return find_cliffs(self.sweep)

    @cached_property
    def collapse(self) -> Collapse | None:
        collapsed = self.cliffs.collapsed.tolist()
        if self.header is None or self.dim not in collapsed:
            return None
        index = collapsed.index(self.dim)
        rescue = int(self.cliffs.rescue[index])
        cause = cause_between(self.sweep, self.dim, rescue, self.header)
        return Collapse(rescue, float(self.cliffs.slowdown[index]), cause)

    def judge(self, rule: Rule, dim: int) -> Judgement:
        launches = self.launches.get(dim, ())
        return rule.check.judge(dim, replace(self.setting, launches=launches) if launches else self.setting)

    def is_sound(self, rules: Sequence[Rule], dim: int) -> bool:
        """Return True if a dim keeps the rules; an unknown one passes with a record, or if it is unknown here too."""
        return all(
            holds or (holds is None and (bool(self.launches.get(dim)) or self.judge(rule, self.dim)[0] is None))
            for rule, (holds, _) in ((rule, self.judge(rule, dim)) for rule in rules)
        )

    def nearest(self, rules: Sequence[Rule]) -> tuple[int | None, int | None]:
        below, above = range(self.dim - 1, max(0, self.dim - REACH), -1), range(self.dim + 1, self.dim + REACH)
        lower, higher = (next((dim for dim in dims if self.is_sound(rules, dim)), None) for dims in (below, above))
        return lower, higher

    @cached_property
    def cost(self) -> Cost | None:
        """Cost of all the broken rules: against a larger dim that keeps every rule that any larger one keeps."""
        if self.latency_ns is not None:
            larger = range(self.dim + 1, self.dim + REACH)
            keepable = [rule for rule in self.rules if any(self.judge(rule, dim)[0] for dim in larger)]
            sound = (dim for dim in self.sweep.dims.tolist() if dim in larger and self.is_sound(keepable, dim))
            if (against := next(sound, None)) is not None:
                slowdown = self.latency_ns / float(self.sweep.ns[self.sweep.dims.searchsorted(against)])
                words = f"{slowdown:.2f}x the latency of {against} ({self.sweep.label})"
                return Cost("measured", words, slowdown, against)
        step = min(self.dim & -self.dim, COARSEST_CLASS)
        median = self.cliffs.class_slowdown.get(step)
        if median is None:
            return None
        kind = "odd dims" if step == 1 else f"odd multiples of {step}"
        words = f"{median:.2f}x, the median of the {kind} over the aligned dims they pad to ({self.sweep.label})"
        return Cost("alignment class", words, float(median))

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        order = (False, None, True)
        return tuple(sorted(map(self._finding, self.rules), key=lambda finding: order.index(finding.holds)))

    def _finding(self, rule: Rule) -> Finding:
        (holds, detail), collapse = self.judge(rule, self.dim), self.collapse
        if holds is False:
            return Finding(rule, holds, detail, *self.nearest([rule]), self.cost or Cost("published", rule.published))
        if rule.name == "cuBLAS heuristic" and collapse and collapse.cause and collapse.cause.kind == "kernel switch":
            words = f"{collapse.slowdown:.2f}x the latency of {collapse.rescue}"
            cost = Cost("measured", words, collapse.slowdown, collapse.rescue)
            return Finding(rule, False, collapse.cause.evidence, None, collapse.rescue, cost)
        waves = "; then ".join(str(run.waves) for run in self.runs if run.waves is not None)
        return Finding(rule, holds, waves if rule.name == "CTA wave quantisation" and waves else detail)

    @property
    def summary(self) -> str:
        sweep, gpu = self.sweep, "" if self.header is None else f" on {self.header.gpu}"
        clauses = "; ".join(filter(None, (self._latency_clause(), self._rules_clause())))
        return f"{sweep.operator} {sweep.axis}={self.dim}{gpu} {clauses}."

    def _latency_clause(self) -> str:
        if self.latency_ns is None:
            return self.not_measured
        latency, collapse = f"takes {self.latency_ns / 1e3:.1f} us", self.collapse
        if collapse is None:
            return f"{latency}, and no larger measured dim is faster"
        because = "" if collapse.cause is None else f" ({collapse.cause.kind}: {collapse.cause.evidence})"
        return f"{latency}, {collapse.slowdown:.2f}x as long as {collapse.rescue}{because}"

    def _rules_clause(self) -> str:
        broken = [finding.rule.name for finding in self.findings if finding.holds is False]
        if not broken:
            return "breaks no rule" if self.findings else "is under no rule"
        sound = " and ".join(str(dim) for dim in self.nearest(self.rules) if dim is not None)
        remedy = f"; the nearest that break none: {sound}" if sound else ""
        return f"breaks {len(broken)} of {len(self.findings)} rules ({', '.join(broken)}){remedy}"
