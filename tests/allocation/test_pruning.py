"""Candidates are the same however they are pruned, combined and filtered."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial, reduce
from itertools import product
from typing import Any

import numpy as np
import pytest

from gac.allocation import pareto
from gac.allocation.candidate_set import CandidateSet, cross_product
from gac.allocation.candidates import candidates
from gac.allocation.latencies import Timing
from gac.allocation.pareto import ParetoSet, dominated, nondominated
from gac.allocation.problem import as_knapsack
from gac.core.arrays import Floats
from gac.core.workloads import Workload
from gac.forms import form_named
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.forms.planned_sites import fuse_sites
from gac.models.sites import Site
from gac.plan.costs import BYTES, PARAMS, ns_of
from gac.plan.recipe import Space
from tests.allocation.small_problems import GATED, QKV, any_times

WORKLOADS = (Workload.parse("prefill:1x1024"), Workload.parse("decode:1@1024"))
NS = tuple(map(ns_of, WORKLOADS))
SCHEMES = ("bf16", "w8a16", "w4a16")
every_site = pytest.mark.parametrize("sites", [QKV, (GATED,)], ids=["qkv", "gated"])


def random_curves(site: Site, rng: np.random.Generator) -> LossCurves:
    """Losses that fall with the dim, of each form and scheme, in eighths: no sum is rounded, so that ties are ties."""
    curves = {}
    for form, scheme, weight in product(("dense", "low_rank", "narrow"), SCHEMES, site.weights):
        full = form_named(form).full(weight)
        falling = np.append(np.cumsum(rng.integers(0, 5, full))[::-1], 0) * (form != "dense")
        curves[form, scheme, weight.name] = LossCurve((falling + SCHEMES.index(scheme) * rng.integers(1, 4)) * 0.125)
    return LossCurves(curves)


def makers(sites: tuple[Site, ...], kind: str) -> list[Callable[..., CandidateSet]]:
    """What makes the candidates of the fused site in any scheme, with two draws of curves."""
    (either,) = fuse_sites(sites, optional=True)
    site = either if kind == "either" else either.with_fusion(kind == "fused")
    space, draws = Space(("low_rank", "narrow"), SCHEMES, align=False), map(np.random.default_rng, range(2))
    return [partial(candidates, site, random_curves(site, draw), space) for draw in draws]


def assert_same(ours: CandidateSet, others: CandidateSet) -> None:
    for field in fields(CandidateSet)[2:]:
        assert np.array_equal(getattr(ours, field.name), getattr(others, field.name)), field.name


@pytest.mark.parametrize("limited", [(BYTES,), (PARAMS, NS[0]), (BYTES, *NS), (PARAMS, BYTES, *NS)], ids=len)
@pytest.mark.parametrize("kind", ["apart", "fused", "either"])
@every_site
def test_pruning_changes_no_candidate(sites: Any, kind: str, limited: tuple[str, ...], monkeypatch: Any) -> None:
    monkeypatch.setattr(pareto, "_FEW", 0)
    build, rng = makers(sites, kind)[0], np.random.default_rng(0)
    pruned = build(Timing(any_times(unknown=64), WORKLOADS), limited)
    with monkeypatch.context() as without:
        without.setattr(ParetoSet, "nondominated", lambda *_: None)
        everything = build(Timing(any_times(unknown=64), WORKLOADS), limited)
    assert_same(pruned, everything)
    limits = {column: 4 * int(np.quantile(pruned.cost(column), 0.4 + 0.2 * rng.random())) for column in limited}
    proofs = [as_knapsack([rows] * 3, limits).solve().certificate for rows in (pruned, everything)]
    assert (proofs[0].status, proofs[0].value) == ("optimal", proofs[1].value)


@pytest.mark.parametrize("limited", [(PARAMS,), (PARAMS, NS[1]), (BYTES, *NS)], ids=len)
@pytest.mark.parametrize("kind", ["fused", "either"])
@every_site
def test_shared_gemms_at_once_change_none(sites: Any, kind: str, limited: tuple[str, ...], monkeypatch: Any) -> None:
    for make in makers(sites, kind):
        ours = make(Timing(any_times(unknown=64), WORKLOADS), limited)
        with monkeypatch.context() as later:
            later.setattr(
                "gac.allocation.candidates.cross_product_fused",
                lambda options, limited, _: cross_product(options, limited, ParetoSet()),
            )
            assert_same(ours, make(Timing(any_times(unknown=64), WORKLOADS), limited))


@pytest.mark.parametrize("needed", [NS[:1], NS], ids=len)
@pytest.mark.parametrize("kind", ["apart", "fused", "either"])
@every_site
def test_only_what_needs_an_unknown_latency_goes(sites: tuple[Site, ...], kind: str, needed: tuple[str, ...]) -> None:
    for make in makers(sites, kind):
        everything = make(Timing(any_times(unknown=2), WORKLOADS), (PARAMS, *NS))
        known = make(Timing(any_times(unknown=2), WORKLOADS), (PARAMS, *NS), needed=needed)
        assert not everything.known(needed).all()
        assert_same(known.pick(known.known(needed)), everything.pick(everything.known(needed)))
        assert known.known(needed).sum() >= len(known) - 1, "the dense site stays"


def points_of(rng: np.random.Generator, most: int, columns: int) -> Floats:
    """Small integers with ties, and some unknown ones."""
    points = rng.integers(0, rng.integers(2, 30), (rng.integers(1, most), columns)).astype(np.float64)
    points[rng.random(points.shape) < 0.1] = np.inf
    return points


def beaten(points: Floats, by: Floats) -> np.ndarray:
    no_larger = (by[None] <= points[:, None]).all(axis=2)
    return (no_larger & (by[None] < points[:, None]).any(axis=2)).any(axis=1)


def front(points: Floats) -> list[bool]:
    """Nondominated, and the first of equal ones."""
    first = [not (points[:row] == points[row]).all(axis=1).any() for row in range(len(points))]
    return (~beaten(points, points) & first).tolist()


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("pairwise", [4, 1 << 11])
def test_the_front_equals_every_pair_compared(columns: int, pairwise: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pareto, "_PAIRWISE", pairwise)
    for seed in range(10):
        points = points_of(np.random.default_rng(seed), 50, columns)
        assert nondominated(points).tolist() == front(points)


@pytest.mark.parametrize("columns", [1, 2, 4])
@pytest.mark.parametrize("pairwise", [4, 1 << 11])
def test_dominance_equals_every_pair_compared(columns: int, pairwise: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pareto, "_PAIRWISE", pairwise)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        points, by = points_of(rng, 150, columns), points_of(rng, 150, columns)
        assert dominated(points, by).tolist() == beaten(points, by).tolist()


def kept(known: ParetoSet, options: list[Floats], extra: Floats) -> list[tuple[int, ...]] | None:
    positions = known.nondominated(options, extra)
    return None if positions is None else list(zip(*(picked.tolist() for picked in positions), strict=True))


@pytest.mark.parametrize("blocks", [1, 4, 1 << 11])
@pytest.mark.parametrize("weights", [1, 2, 3])
def test_pruned_combinations_are_the_dominated_ones(blocks: int, weights: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are floats whose sums are rounded, some of them ties; a few latencies are unknown."""
    monkeypatch.setattr(pareto, "_FEW", 0)
    monkeypatch.setattr(pareto, "_BLOCKS", blocks)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        columns = int(rng.integers(1, 5))
        options = [rng.integers(0, 9, (rng.integers(1, 16), columns)) * 0.1 for _ in range(weights)]
        for rows in options:
            rows[rng.random(rows.shape) < 0.02] = np.inf
        extra = rng.integers(0, 3, columns) * 0.1
        combinations = list(product(*(range(len(rows)) for rows in options)))
        sums = np.array(
            [
                reduce(np.add, [rows[row] for rows, row in zip(options, picked, strict=True)]) + extra
                for picked in combinations
            ]
        )
        known = [sums[rng.integers(0, len(sums), 5)], sums[rng.integers(0, len(sums), 9)] * rng.choice([0.9, 1.0, 1.2])]
        mask = ~beaten(sums, np.concatenate(known))
        expected = [combination for combination, stays in zip(combinations, mask, strict=True) if stays]
        assert kept(ParetoSet().extend(*known), options, extra) == expected
