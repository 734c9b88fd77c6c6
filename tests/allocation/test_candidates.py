"""Candidate sets from curves and a hand-made latency table."""

import itertools
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from gac.allocation import candidate_set
from gac.allocation.candidate_set import CandidateSet
from gac.allocation.candidates import candidates
from gac.allocation.latencies import Timing, other_axes
from gac.allocation.problem import as_knapsack
from gac.allocation.split_latencies import SplitTiming
from gac.core.errors import ProfileError
from gac.core.operations import Operation, all_gather, linear
from gac.core.workloads import Workload
from gac.forms import Form, form_named
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.forms.narrow_pair import widths
from gac.forms.planned_sites import fuse_sites
from gac.forms.tensor_parallel import split_operations
from gac.models.sites import Site, Weight
from gac.plan.costs import PARAMS, ns_of
from gac.plan.recipe import Space
from gac.profiling.records import Measurement
from gac.profiling.table import Profile
from gac.runtime import contract
from gac.runtime.contract import apart_from
from tests.allocation.small_problems import GATED, QKV, any_times, curves_by
from tests.allocation.small_problems import measured as row
from tests.allocation.test_pruning import assert_same, every_site
from tests.headers import make_profile

PREFILL, DECODE = Workload.parse("prefill:1x1024"), Workload.parse("decode:1@1024")
Q = Site("q", 0, "q_proj", (Weight("q", 64, 64),))
MLP = Site("mlp", 0, "mlp", (Weight("gate", 24, 8, "out"), Weight("up", 24, 8, "out"), Weight("down", 8, 24, "in")))


def curve(full: int, seed: int = 0) -> LossCurve:
    steps = np.random.default_rng(seed).random(full) ** 3
    return LossCurve(np.append(np.cumsum(steps[::-1])[::-1], 0.0))


def curves_of(*sites: Site) -> LossCurves:
    ranks = {
        w.name: curve(min(w.out_features, w.in_features), index)
        for each in sites
        for index, w in enumerate(each.weights)
    }
    widths = {w.name: curve(w.in_features, 9) for each in sites for w in each.weights if w.neurons == "in"}
    within = {
        pair.name: {w.name: inside(curve(pair.full(w), index), pair) for index, w in enumerate(each.weights)}
        for each in sites
        for pair in form_named("narrow_pair").variants(each.weights[-1])
    }
    return curves_by(low_rank=ranks, narrow=widths, **within)


def inside(of: LossCurve, pair: Form) -> LossCurve:
    """The narrower the MLP is, the less there is to lose."""
    return LossCurve(pair.shortening(1)[1] / 24 * of.loss)


def loss_of(curves: LossCurves, form: str, weight: Weight, dim: int) -> float:
    return float(curves.of(form_named(form), weight).loss[dim])


def profile(*rows: Measurement) -> Profile:
    return make_profile(rows)


def made(site: Site, curves: LossCurves, table: Profile | None, *forms: str, **changed: Any) -> CandidateSet:
    """Of these forms at every dim, where parameters are limited in one workload."""
    stated = {"align": False, "workloads": [PREFILL], "limited": ["params"]} | changed
    timing = Timing(table, tuple(stated["workloads"]))
    return candidates(site, curves, Space(forms, align=stated["align"]), timing, stated["limited"])


def pairs(m: int, k: int, n: int) -> list[Measurement]:
    """Ranks 1 to 128, multiples of 8 in 100 ns plus the rank and others in three times that; and the dense GEMM."""
    timed = [row("low_rank", (100 + r) * (1 if r % 8 == 0 else 3) - 0.5, m=m, k=k, r=r, n=n) for r in range(1, 129)]
    return [*timed, row("linear", 150.2, m=m, k=k, n=n)]


Q_PROFILE = profile(*pairs(1024, 64, 64), *pairs(1, 64, 64))


def q_candidates(*forms: str, table: Profile | None = Q_PROFILE, **changed: Any) -> CandidateSet:
    return made(Q, curves_of(Q), table, *forms, **{"workloads": [PREFILL, DECODE], "align": True} | changed)


def test_a_linear_site_has_its_sound_ranks_and_dense() -> None:
    result = q_candidates("low_rank")
    assert result.dims[:, 0].tolist() == [8, 16, 24, 64]
    assert result.forms[:, 0].tolist() == ["low_rank", "low_rank", "low_rank", "dense"]
    assert result.params.tolist() == [1024, 2048, 3072, 4096]
    assert result.loss.tolist() == [*curve(64).loss[[8, 16, 24]], 0.0]
    assert result.latency.tolist() == [[108, 108], [116, 116], [124, 124], [151, 151]]
    assert not result.interpolated.any()


@pytest.mark.parametrize(("align", "ranks"), [(12, [24]), (16, [16]), (False, [*range(1, 32)])])
def test_a_step_keeps_its_multiples_among_the_sound_ranks(align: int, ranks: list[int]) -> None:
    assert q_candidates("low_rank", align=align).dims[:, 0].tolist() == [*ranks, 64]


def test_unknown_and_interpolated_latencies_and_no_table() -> None:
    other = Site("o", 0, "o_proj", (Weight("o", 96, 48),))
    result = made(other, curves_of(other), Q_PROFILE, "low_rank", align=True)
    assert result.dims[:, 0].tolist() == [8, 16, 24, 48]
    assert (result.latency == -1).all()
    kept = [timed for timed in pairs(1024, 64, 64) if timed.shape.get("r") != 24]
    result = q_candidates("low_rank", table=profile(*kept), workloads=[PREFILL], align=False)
    counted = dict(zip(result.dims[:, 0].tolist(), result.interpolated[:, 0].tolist(), strict=True))
    assert [dim for dim, times in counted.items() if times] == [24]
    assert result.latency[result.dims[:, 0] == 24, 0].tolist() == [140]
    with pytest.raises(ProfileError, match="align=True without a profile"):
        q_candidates("low_rank", table=None)


# --- the MLP as one site --------------------------------------------------------------------------------------------


def mlp_candidates(table: Profile | None = None, *forms: str, **changed: Any) -> CandidateSet:
    return made(MLP, curves_of(MLP), table, *(forms or ("low_rank", "narrow")), **changed)


Choices = list[tuple[int, float, int]]
"""Parameters, loss and ns of each."""


def check_front(result: CandidateSet, everything: Choices) -> None:
    """In parameters and loss."""
    points = [(params, loss) for params, loss, _ in everything]
    front = {
        (params, round(loss, 12))
        for params, loss in points
        if not any((p <= params and x < loss) or (p < params and x <= loss) for p, x in points)
    }
    assert {(int(p), round(float(x), 12)) for p, x in zip(result.params, result.loss, strict=True)} == front


def check_optima(result: CandidateSet, everything: Choices, limits: Sequence[int], shares: Sequence[float]) -> None:
    """The least loss within each limit of parameters, and of latency at each quantile of those within it."""
    for limit in limits:
        times = np.quantile([ns for params, _, ns in everything if params <= limit], shares).astype(int).tolist()
        for most in times:
            best = min(loss for params, loss, ns in everything if params <= limit and ns <= most)
            solution = as_knapsack([result], {PARAMS: limit, ns_of(PREFILL): most}).solve()
            assert solution.certificate.value == pytest.approx(best, abs=1e-12)


# --- weights that share their first GEMM ----------------------------------------------------------------------------


def fused_site(sites: tuple[Site, ...]) -> tuple[Site, LossCurves]:
    (site,) = fuse_sites(sites)
    return site, curves_of(*sites)


def fused_candidates(site: Site, curves: LossCurves, table: Profile, *more: str) -> CandidateSet:
    return made(site, curves, table, "low_rank", "narrow", *more, limited=["params", f"ns:{PREFILL}"])


def as_it_runs(site: Site, forms, dims, table: Profile) -> int:
    """One GEMM for what is shared, those of the parts that run apart, and what is left of each weight."""
    width, ns = 0, 0
    for index, (weight, name, dim) in enumerate(zip(site.weights, forms, dims, strict=True)):
        form = form_named(name)
        left = (
            form.latency.gemm_after_fused(weight, dim, 1024)
            if index in site.fused
            else form.latency.operation(weight, dim, 1024)
        )
        ns += 0 if left is None else table.point(left)
        features = form.latency.gemms(weight, dim, 1)[0].axes["n"] if index in site.fused else 0
        if features >= apart_from(1024):
            ns += table.point(linear(1024, weight.in_features, features))
        else:
            width += features
    return ns + (table.point(linear(1024, site.weights[0].in_features, width)) if width else 0)


def combinations(site: Site, curves: LossCurves, table: Profile | None = None) -> list[tuple[int, float, int]]:
    """(params, loss, ns) of all rank and dense combinations, and of all widths; 0 ns without a table."""
    low, dense = form_named("low_rank"), form_named("dense")
    options = [
        [("dense", dense.full(w), w.params, 0.0)]
        + [
            ("low_rank", r, low.params(w, r), loss_of(curves, "low_rank", w, r))
            for r in range(1, low.max_useful_dim(w) + 1)
        ]
        for w in site.weights
    ]
    result = []
    for parts in itertools.product(*options):
        forms, dims, params, loss = zip(*parts, strict=True)
        result.append((sum(params), float(sum(loss)), as_it_runs(site, forms, dims, table) if table else 0))
    for down in (weight for weight in site.weights if weight.neurons == "in"):
        for w in range(1, 24):
            ns = as_it_runs(site, ["narrow"] * 3, [w] * 3, table) if table else 0
            result.append((3 * 8 * w, loss_of(curves, "narrow", down, w), ns))
    return result


def test_sites_that_read_the_same_input_become_one() -> None:
    merged = fuse_sites((*QKV, Q, GATED))
    assert [site.name for site in merged] == ["a.q_proj+k_proj+v_proj", "q", "mlp"]
    assert [site.fused for site in merged] == [(0, 1, 2), (), (0, 1)]
    assert [weight.name for weight in merged[0].weights] == ["q", "k", "v"]


@pytest.fixture(params=[1 << 22, 10 << 10], ids=["none", "some"])
def _apart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many weights run apart for their many outputs."""
    monkeypatch.setattr("gac.runtime.contract._ENOUGH_OUTPUTS", request.param)


def check_latencies(result: CandidateSet, site: Site, table: Profile) -> None:
    for forms, dims, latency in zip(result.forms, result.dims.tolist(), result.latency[:, 0], strict=True):
        assert as_it_runs(site, forms, dims, table) == latency > 0


@pytest.mark.usefixtures("_apart")
@every_site
def test_no_optimum_of_fused_weights_is_lost_and_latencies_are_those_of_their_gemms(sites) -> None:
    table = any_times()
    site, curves = fused_site(sites)
    reduced = fused_candidates(site, curves, table)
    check_latencies(reduced, site, table)
    limits = [int(share * site.params) for share in (0.3, 0.5, 0.8)]
    check_optima(reduced, combinations(site, curves, table), limits, (0.01, 0.1, 0.5))


def test_products_in_batches_give_the_same_set(monkeypatch: pytest.MonkeyPatch) -> None:
    site, curves = fused_site((GATED,))
    unbatched = fused_candidates(site, curves, any_times())
    monkeypatch.setattr(candidate_set, "_BATCH", 20)
    assert_same(fused_candidates(site, curves, any_times()), unbatched)


@every_site
def test_where_fusing_is_a_choice_the_candidates_of_both_kinds_compete(sites) -> None:
    table = any_times()
    (site,) = fuse_sites(sites, optional=True)
    _, curves = fused_site(sites)
    apart, fused, both = (fused_candidates(each, curves, table) for each in (*site.fused_and_unfused, site))
    assert {*both.shared.tolist()} == {False, True}
    for share, quantile in itertools.product((0.3, 0.5, 0.8), (0.01, 0.1, 0.5)):
        limit, most = int(share * site.params), int(np.quantile(both.latency, quantile))
        best, *others = (least_loss(each, limit, most) for each in (both, apart, fused))
        assert best == min(others)


def least_loss(rows: CandidateSet, limit: int, most: int) -> float:
    return min(rows.loss[(rows.params <= limit) & (rows.latency[:, 0] <= most)], default=np.inf)


@pytest.mark.parametrize("workloads", [[PREFILL], [PREFILL, DECODE]], ids=["all known", "one unknown"])
@pytest.mark.parametrize(("fused_ns", "faster"), [(20.0, True), (40.0, False)])
def test_of_equal_parameters_the_faster_way_stays(fused_ns: float, faster: bool, workloads: list[Workload]) -> None:
    (site,) = fuse_sites(QKV, optional=True)
    sizes = {8: 10.0, 12: 10.0, sum(weight.out_features for weight in site.weights): fused_ns}
    table = profile(*[row("linear", ns, m=1024, k=16, n=n) for n, ns in sizes.items()])
    result = made(site, LossCurves({}), table, workloads=workloads)
    assert result.shared[result.latency[:, 0] == min(fused_ns, 30)].tolist() == [faster]


# --- pairs inside a narrower MLP ------------------------------------------------------------------------------------


def pairs_inside(site: Site, curves: LossCurves, table: Profile | None = None) -> list[tuple[int, float, int]]:
    """(params, loss, ns) of every combination at every width of the grid: each weight narrow or any smaller pair."""
    result, down = [], site.weights[-1]
    for pair in form_named("narrow_pair").variants(down):
        _, width = pair.shortening(1)
        narrow, lost = form_named("narrow"), loss_of(curves, "narrow", down, width)
        options = [
            [(narrow, width, 0.0)]
            + [
                (pair, rank, loss_of(curves, pair.name, weight, rank))
                for rank in range(1, pair.full(weight) + 1)
                if pair.params(weight, rank) < narrow.params(weight, width)
            ]
            for weight in site.weights
        ]
        for parts in itertools.product(*options):
            forms, dims, losses = zip(*parts, strict=True)
            params = sum(form.params(w, dim) for form, w, dim in zip(forms, site.weights, dims, strict=True))
            ns = as_it_runs(site, [form.name for form in forms], dims, table) if table else 0
            result.append((params, lost + sum(losses), ns))
    return result


@pytest.mark.parametrize("asked", [["narrow_pair"], [f"narrow_pair:{width}" for width in widths(24)]], ids=len)
def test_the_front_with_pairs_inside_is_that_of_every_combination(asked: list[str]) -> None:
    curves = curves_of(MLP)
    result = mlp_candidates(None, "low_rank", "narrow", *asked)
    check_front(result, [*combinations(MLP, curves), *pairs_inside(MLP, curves)])
    assert any("narrow_pair:" in form for form in result.forms.flat)


@pytest.mark.usefixtures("_apart")
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_no_optimum_with_pairs_inside_is_lost(fused: bool) -> None:
    table, curves = any_times(), curves_of(GATED)
    site = fuse_sites((GATED,))[0] if fused else GATED
    reduced = fused_candidates(site, curves, table, "narrow_pair")
    everything = [*combinations(site, curves, table), *pairs_inside(site, curves, table)]
    check_optima(reduced, everything, (150, 250, 400), (0.01, 0.1, 0.5))
    check_latencies(reduced, site, table)


def test_pairs_lie_inside_widths_that_are_sound_and_nowhere_else() -> None:
    result = mlp_candidates(None, "narrow_pair")
    assert result.forms.tolist() == [["dense"] * 3]
    slow = [row("linear", 300.0 if width % 4 else 100.0 + width, m=1024, k=8, n=width) for width in range(1, 129)]
    free = LossCurves(
        {key: LossCurve(result.loss * (":" not in key[0])) for key, result in curves_of(MLP).by_key.items()}
    )
    result = made(MLP, free, None, "narrow", "narrow_pair")
    aligned = made(MLP, free, profile(*slow), "narrow", "narrow_pair", align=4)
    index = [{str(form) for form in rows.forms.flat if ":" in form} for rows in (result, aligned)]
    assert index == [{f"narrow_pair:{width}" for width in kept} for kept in (widths(24), (12,))]  # 8 has no such rank
    for forms, dims in zip(aligned.forms.tolist(), aligned.dims.tolist(), strict=True):
        lengths = {form_named(form).shortening(dim) for form, dim in zip(forms, dims, strict=True)}
        assert forms == ["dense"] * 3 or len(lengths) == 1


# --- weights that are split over two GPUs --------------------------------------------------------------------------

GPUS, READ = 2, 64
WEIGHTS = (
    Weight("q", 64, READ, input_group="in"),
    Weight("k", 16, READ, input_group="in"),
    Weight("v", 16, READ, input_group="in"),
)
SITE = Site("s", 0, "s", WEIGHTS, fused=(0, 1, 2))
WORKLOADS = (PREFILL, DECODE)
LOW_RANK, DENSE = form_named("low_rank"), form_named("dense")


def by_hand(table: Profile, forms: list[str], dims: list[int], workload: Workload) -> int:
    """Parts that run apart with their gathers, one GEMM and one gather of all others, and the second factors; or -1."""
    runs, width, numbers = list[Operation](), 0, 0
    for weight, form, dim in zip(WEIGHTS, map(form_named, forms), dims, strict=True):
        first, *behind = split_operations(form, weight, dim, workload.rows, GPUS)
        gather = behind[:1] if form is LOW_RANK else []
        runs += behind[len(gather) :]
        if first.axes["n"] >= apart_from(workload.rows):
            runs += [first, *gather]
        else:
            width += first.axes["n"]
            numbers += sum(item.axes["n"] for item in gather)
    runs += [linear(workload.rows, READ, width)] * (width > 0)
    runs += [all_gather(GPUS, workload.rows, numbers)] * (numbers > 0)
    result = [
        int(table.latency(item.operator, other_axes(item, "n"), "n", np.array([item.axes["n"]]))[0][0]) for item in runs
    ]
    return -1 if min(result) < 0 else sum(result)


@pytest.mark.parametrize("enough", [1 << 22, 10 << 10, pytest.param(4 << 10, marks=pytest.mark.slow)])
def test_no_combination_by_hand_is_better(enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "_ENOUGH_OUTPUTS", enough)
    table = any_times(unknown=64)
    curves = curves_by(low_rank={item.name: curve(item.out_features, index) for index, item in enumerate(WEIGHTS)})
    columns = [PARAMS, *map(ns_of, WORKLOADS)]
    timing = SplitTiming(table, WORKLOADS, GPUS)
    result = candidates(SITE, curves, Space(("low_rank",), align=False), timing, columns)
    for forms, dims, latency in zip(result.forms.tolist(), result.dims.tolist(), result.latency.tolist(), strict=True):
        assert latency == [by_hand(table, forms, dims, item) for item in WORKLOADS]
    choices = []
    for item in WEIGHTS:
        ranks = [rank for rank in range(2, LOW_RANK.max_useful_dim(item) + 1) if rank % GPUS == 0]
        choices.append([("dense", DENSE.full(item)), *(("low_rank", rank) for rank in ranks)])
    for combination in product(*choices):
        forms, dims = [form for form, _ in combination], [dim for _, dim in combination]
        latency = [by_hand(table, forms, dims, item) for item in WORKLOADS]
        if min(latency) < 0:
            continue
        each = list(zip(WEIGHTS, forms, dims, strict=True))
        params = sum(form_named(form).params(item, dim) for item, form, dim in each)
        loss = sum(float(curves.of(LOW_RANK, item).loss[dim]) for item, form, dim in each if form != "dense")
        no_worse = (result.params <= params) & (result.loss <= loss + 1e-12) & (result.latency <= latency).all(1)
        assert no_worse.any(), combination
