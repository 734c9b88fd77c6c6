"""Combinations that rivals do not beat, beside every combination looked at; candidates made in other ways, the same."""

from collections.abc import Mapping
from dataclasses import fields
from functools import partial, reduce
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from gac.allocation import rivals as rivals_module
from gac.allocation.candidate_set import CandidateSet
from gac.allocation.candidates import candidates
from gac.allocation.combining import combined
from gac.allocation.latencies import Timing
from gac.allocation.problem import as_knapsack
from gac.allocation.rivals import Rivals
from gac.core.arrays import Floats, Ints
from gac.core.operations import Operation
from gac.core.workloads import Workload
from gac.forms import form_named
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.forms.planned_sites import fuse_sites
from gac.models.sites import Site, Weight
from gac.plan.costs import BYTES, PARAMS, ns_of
from gac.plan.recipe import Space
from gac.profiling.table import Profile
from tests.allocation.small_problems import profile


def unbeaten(rivals: Rivals, options: list[Floats], besides: Floats) -> list[tuple[int, ...]] | None:
    """Positions of each combination that is left."""
    found = rivals.unbeaten(options, besides)
    return None if found is None else list(zip(*(at.tolist() for at in found), strict=True))


@pytest.mark.parametrize("blocks", [1, 4, 1 << 11])
@pytest.mark.parametrize("weights", [1, 2, 3])
def test_what_is_left_is_what_no_rival_beats(blocks: int, weights: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are floats whose sums are rounded, some of them ties; a few latencies are unknown."""
    monkeypatch.setattr(rivals_module, "_FEW", 0)
    monkeypatch.setattr(rivals_module, "_BLOCKS", blocks)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        columns = int(rng.integers(1, 5))
        options = [rng.integers(0, 9, (rng.integers(1, 24), columns)) * 0.1 for _ in range(weights)]
        for rows in options:
            rows[rng.random(rows.shape) < 0.02] = np.inf
        besides = rng.integers(0, 3, columns) * 0.1
        everything = {
            at: reduce(np.add, [rows[one] for rows, one in zip(options, at, strict=True)]) + besides
            for at in product(*(range(len(rows)) for rows in options))
        }
        sums = np.array(list(everything.values()))
        known = [sums[rng.integers(0, len(sums), 5)], sums[rng.integers(0, len(sums), 9)] * rng.choice([0.9, 1.0, 1.2])]
        expected = [
            at
            for at, own in everything.items()
            if not any((one <= own).all() and (one < own).any() for one in np.concatenate(known))
        ]
        assert unbeaten(Rivals().joined_by(*known), options, besides) == expected


def test_without_rivals_or_for_few_combinations_nothing_is_said() -> None:
    options = [np.zeros((3, 2))] * 2
    assert Rivals().unbeaten(options * 5, np.zeros(2)) is None
    assert Rivals((np.zeros((1, 2)),)).unbeaten(options, np.zeros(2)) is None


def test_where_rivals_beat_too_little_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals_module, "_FEW", 0)
    monkeypatch.setattr(rivals_module, "_MANY", 20)
    rows = np.arange(20, dtype=np.float64)[:, None] * [1.0, -1.0]
    assert unbeaten(Rivals((np.array([[99.0, 99.0]]),)), [rows, rows], np.zeros(2)) is None


WORKLOADS = (Workload.parse("prefill:1x1024"), Workload.parse("decode:1@1024"))
NS = tuple(map(ns_of, WORKLOADS))
SCHEMES = ("bf16", "w8a16", "w4a16")
GATED = Site(
    "mlp",
    0,
    "mlp",
    (Weight("gate", 24, 8, "out", "mlp"), Weight("up", 24, 8, "out", "mlp"), Weight("down", 8, 24, "in")),
)
QKV = tuple(
    Site(name, 0, f"{name}_proj", (Weight(name, n, 16, input_group="a"),))
    for name, n in {"q": 12, "k": 8, "v": 8}.items()
)


class Anything(Profile):
    """Times that grow with the shape, and by chance, in any dtype; a few are unknown."""

    def latency(
        self, operator: str, fixed: Mapping[str, int], axis: str, dims: Ints, dtype: str = "bf16"
    ) -> tuple[Ints, NDArray[np.bool_]]:
        key = [*map(ord, f"{operator}{sorted(fixed.items())}{axis}{dtype}")]
        by_chance = np.random.default_rng(key).integers(1, 60, 64)[dims % 64]
        return np.where(by_chance == 7, -1, by_chance + dims), np.ones(len(dims), dtype=np.bool_)

    def point(self, operation: Operation, dtype: str = "bf16") -> int | None:
        shape = dict(operation.shape)
        n = shape.pop("n")
        ns, _ = self.latency(operation.operator, shape, "n", np.array([n]), dtype)
        return None if ns[0] < 0 else int(ns[0])


class Half(Anything):
    """Half of them are unknown."""

    def latency(
        self, operator: str, fixed: Mapping[str, int], axis: str, dims: Ints, dtype: str = "bf16"
    ) -> tuple[Ints, NDArray[np.bool_]]:
        ns, measured = super().latency(operator, fixed, axis, dims, dtype)
        return np.where((ns - dims) % 2 == 0, ns, -1), measured


class OnlyDense(Profile):
    """Knows no latency but that of a GEMM as wide as a weight."""

    def latency(
        self, operator: str, fixed: Mapping[str, int], axis: str, dims: Ints, dtype: str = "bf16"
    ) -> tuple[Ints, NDArray[np.bool_]]:
        return np.where((operator == "linear") & np.isin(dims, (8, 12)), 5, -1), np.ones(len(dims), dtype=np.bool_)


def anything(kind: type[Profile] = Anything) -> Profile:
    table = profile([])
    return kind(table.path, table.header, table.measurements, table.digest, table.sentinels)


def random_curves(site: Site, rng: np.random.Generator) -> LossCurves:
    """Losses that fall with the dim, of each form and scheme, in eighths: no sum is rounded, so that ties are ties."""
    curves = {}
    for form, scheme, weight in product(("dense", "low_rank", "narrow"), SCHEMES, site.weights):
        full = form_named(form).full(weight)
        falling = np.append(np.cumsum(rng.integers(0, 5, full))[::-1], 0) * (form != "dense")
        curves[form, scheme, weight.name] = LossCurve((falling + SCHEMES.index(scheme) * rng.integers(1, 4)) * 0.125)
    return LossCurves(curves)


@pytest.mark.parametrize("limited", [(BYTES,), (PARAMS, NS[0]), (BYTES, *NS), (PARAMS, BYTES, *NS)], ids=len)
@pytest.mark.parametrize("kind", ["apart", "fused", "either"])
@pytest.mark.parametrize("sites", [QKV, (GATED,)], ids=["qkv", "gated"])
def test_candidates_and_optimum_are_those_without_rivals(
    sites: tuple[Site, ...], kind: str, limited: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (site,) = fuse_sites(sites, optional=True)
    site = site if kind == "either" else site.with_fusion(kind == "fused")
    monkeypatch.setattr(rivals_module, "_FEW", 0)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        curves, timing = random_curves(site, rng), Timing(anything(), WORKLOADS)
        space = Space(("low_rank", "narrow"), SCHEMES, align=False)
        ours = candidates(site, curves, space, timing, limited)
        with monkeypatch.context() as without:
            without.setattr(Rivals, "unbeaten", lambda *_: None)
            all_of_them = candidates(site, curves, space, timing, limited)
        for field in fields(CandidateSet)[2:]:
            assert np.array_equal(getattr(ours, field.name), getattr(all_of_them, field.name)), field.name
        limits = {column: 4 * int(np.quantile(ours.cost(column), 0.4 + 0.2 * rng.random())) for column in limited}
        one, other = (as_knapsack([rows] * 3, limits).solve() for rows in (ours, all_of_them))
        assert (one.certificate.status, one.certificate.value) == ("optimal", other.certificate.value)


def one_site(sites: tuple[Site, ...], kind: str) -> Site:
    (site,) = fuse_sites(sites, optional=True)
    return site if kind == "either" else site.with_fusion(kind == "fused")


def assert_same(ours: CandidateSet, others: CandidateSet) -> None:
    for field in fields(CandidateSet)[2:]:
        assert np.array_equal(getattr(ours, field.name), getattr(others, field.name)), field.name


@pytest.mark.parametrize("limited", [(PARAMS,), (PARAMS, NS[1]), (BYTES, *NS)], ids=len)
@pytest.mark.parametrize("kind", ["fused", "either"])
@pytest.mark.parametrize("sites", [QKV, (GATED,)], ids=["qkv", "gated"])
def test_a_shared_gemm_that_counts_at_once_leaves_the_same_candidates(
    sites: tuple[Site, ...], kind: str, limited: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, space = one_site(sites, kind), Space(("low_rank", "narrow"), SCHEMES, align=False)
    for seed in range(3):
        make = partial(candidates, site, random_curves(site, np.random.default_rng(seed)), space)
        ours = make(Timing(anything(), WORKLOADS), limited)
        with monkeypatch.context() as later:
            later.setattr(
                "gac.allocation.making.combined_sharing",
                lambda options, limited, _: combined(options, limited, Rivals()),
            )
            assert_same(ours, make(Timing(anything(), WORKLOADS), limited))


@pytest.mark.parametrize("needed", [NS[:1], NS], ids=len)
@pytest.mark.parametrize("kind", ["apart", "fused", "either"])
@pytest.mark.parametrize("sites", [QKV, (GATED,)], ids=["qkv", "gated"])
def test_what_needs_an_unknown_latency_is_left_out_and_nothing_else(
    sites: tuple[Site, ...], kind: str, needed: tuple[str, ...]
) -> None:
    site, space = one_site(sites, kind), Space(("low_rank", "narrow"), SCHEMES, align=False)
    for seed in range(3):
        make = partial(candidates, site, random_curves(site, np.random.default_rng(seed)), space)
        everything = make(Timing(anything(Half), WORKLOADS), (PARAMS, *NS))
        known = make(Timing(anything(Half), WORKLOADS), (PARAMS, *NS), needed=needed)
        assert not everything.known(needed).all()
        assert_same(known.at(known.known(needed)), everything.at(everything.known(needed)))
        assert known.known(needed).sum() >= len(known) - 1, "the dense site stays"


def test_where_only_the_dense_site_is_known_it_is_the_only_candidate() -> None:
    site, timing = one_site(QKV, "apart"), Timing(anything(OnlyDense), WORKLOADS)
    make = partial(candidates, site, random_curves(site, np.random.default_rng(0)), Space(("low_rank",), align=False))
    assert make(timing, (PARAMS, *NS), needed=NS).forms.tolist() == [["dense"] * 3]
    assert len(make(timing, (PARAMS, *NS))) > 1


def test_where_nothing_is_known_everything_stays() -> None:
    site = one_site(QKV, "fused")
    make = partial(candidates, site, random_curves(site, np.random.default_rng(0)), Space(("low_rank",), align=False))
    assert_same(*(make(Timing(None, WORKLOADS), (PARAMS, *NS), needed=needed) for needed in ((), NS)))
