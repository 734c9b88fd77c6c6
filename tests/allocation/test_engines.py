"""Plans for an engine: GEMMs that weights share, whatever a plan does, kernels, whole steps, and what is refused."""

import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from gac.allocation.candidates import weight_candidates
from gac.allocation.decide import decide
from gac.allocation.dense import DenseModel
from gac.allocation.dims import runnable_dims
from gac.allocation.frontier import frontier
from gac.allocation.latencies import Timing
from gac.allocation.problem import Problem
from gac.allocation.resolve import engine_steps, resolve, without_needless_runs
from gac.allocation.rules import RULES
from gac.allocation.split_latencies import SplitTiming
from gac.core.errors import BudgetError, GacError, PlanError, ProfileError
from gac.core.operations import linear
from gac.core.workloads import Workload
from gac.forms import DENSE, form_named
from gac.forms.loss_curves import LossCurve
from gac.forms.planned_sites import as_planned, fuse_sites
from gac.models.families import family_of
from gac.models.shapes import SHAPES
from gac.models.sites import Site, Weight
from gac.plan.engines import ENGINES, PAIR, STEPS, VLLM, Step, paired_rank, steps_of
from gac.plan.evidence import ProfileUsed
from gac.plan.recipe import Recipe
from gac.plan.summary import latencies
from gac.profiling.records import Measurement, Point
from gac.profiling.sweeps.coverage import fused_points, model_points
from gac.profiling.table import Profile
from gac.schemes import Scheme, scheme_named
from gac_extensions.report.charts import charts
from gac_extensions.report.render import _time, report_page
from gac_extensions.report.sources import Sources
from tests.allocation.small_problems import MEASURED, PREFILL, SIDE, curves_by, measured, profile, rows
from tests.headers import make_profile

DECODE = "decode:1@64"
CURVE = LossCurve(np.array([8.0, 8.0, 4.0, 2.0, 1.0, 0.5, *[0.0] * (SIDE - 5)]))
CURVES = curves_by(low_rank=dict.fromkeys(("site0", "site1"), CURVE))
APART, TOGETHER = [1000, 2000, 3000, 4000, 5000, 6000], 7000
SMOLLM2, USED = SHAPES["smollm2"], ProfileUsed("a GPU", "1" * 64, "named")


def sites_of(group: str = "") -> tuple[Site, ...]:
    """Two weights, of one input where that has a name."""
    weights = [Weight(f"site{index}", SIDE, SIDE, input_group=group or None) for index in range(2)]
    return tuple(Site(weight.name, 0, kind, (weight,)) for weight, kind in zip(weights, "qk", strict=True))


def by_bytes(point: Point) -> float:
    axes = point.operation.axes
    return 1000.0 + axes["k"] * axes.get("n", 1) / 100


def linear_ns(k: int, n: int) -> float:
    return by_bytes(Point(linear(1, k, n)))


def table_of(
    scale: float, paired_ns: float | None = None, stored: Mapping[Scheme, float] = MappingProxyType({})
) -> Profile:
    """SmolLM2's shapes for one workload as vLLM runs them, and steps in which GEMMs take ``scale`` times as long.

    Args:
        paired_ns: of the step in which all weights are pairs; None: the table is older.
        stored: ns of steps in which all weights lie in a scheme.
    """
    workload, schemes = Workload.parse(DECODE), [scheme.name for scheme in stored]
    points = [
        *model_points(SMOLLM2, [workload], schemes=schemes), *fused_points(SMOLLM2, [workload], schemes=schemes),
    ]  # fmt: skip
    served = dict.fromkeys(replace(point, operation=VLLM.operation(point.operation, point.dtype)) for point in points)
    halved = 30 * 576 * (1536 + 768) / 100  # ns that GEMMs of half the MLPs save
    steps_ns = (1_200_000.0, 1_000_000.0, 1_000_000.0 - scale * halved, paired_ns)
    steps = zip(steps_of(SMOLLM2, workload), steps_ns, strict=True)
    timed = {point: by_bytes(point) for point in served} | {Point(step): ns for step, ns in steps if ns is not None}
    timed |= {Point(steps_of(SMOLLM2, workload)[1], scheme.dtype): ns for scheme, ns in stored.items()}
    return make_profile(Measurement.of(point, ns, 0.0, 10, 1980, True) for point, ns in timed.items())


@pytest.fixture(scope="module")
def table() -> Profile:
    return table_of(1.25)


@pytest.mark.parametrize(
    ("options", "forms"),
    [
        ({"latency": 0.9}, ("low_rank", "narrow")),  # the plugin serves the dense model in 0.845 of the engine's time
        ({"latency": 0.8}, ("low_rank", "narrow", "skip")),
        ({"latency": 0.9, "budget": 0.9}, ("low_rank", "narrow", "skip")),
        ({"latency": 0.9, "kv_cache": 0.9, "forms": ("low_rank", "skip")}, ("low_rank", "skip")),
        ({"latency": 0.9, "schemes": ("bf16", "w4a16")}, ("low_rank", "narrow", "skip")),
    ],
)
def test_blocks_are_not_left_out_in_vain(options: dict[str, Any], forms: tuple[str, ...]) -> None:
    """Where the dense model is within the limits, no form is measured by runs of the model."""
    recipe = Recipe.of(**{"budget": 1.0, "workloads": "decode:1@1024", "engine": "vllm"} | options)
    table = Profile.load("nvidia-h200-vllm")
    resolved = resolve(recipe, SHAPES["llama-3-8b"], table, USED)
    assert without_needless_runs(resolved, table).recipe.space.forms == forms


def test_few_rows_run_in_the_engine_s_kernels() -> None:
    assert VLLM.operation(linear(64, 8, 8), "bf16").operator == "served_linear"
    assert VLLM.operation(linear(65, 8, 8), "bf16") == linear(65, 8, 8)
    assert VLLM.operation(linear(1, 8, 8), "w4a16") == linear(1, 8, 8)
    assert ENGINES["transformers"].operation(linear(1, 8, 8), "bf16") == linear(1, 8, 8)


@pytest.mark.parametrize("fuse", [None, True])
def test_a_table_with_steps_of_the_model_is_planned_with_for_vllm(fuse: bool | None, table: Profile) -> None:
    asked = Recipe.of(0.8, workloads=DECODE, **({} if fuse is None else {"engine": "vllm"}))
    resolved = resolve(asked, SMOLLM2, table, USED)
    assert resolved.recipe.deployment.engine == "vllm"
    assert resolved.recipe.deployment.fuse is True
    assert resolved.steps == {DECODE: Step(1_200_000, 1_000_000, Fraction(5, 4))}


@pytest.mark.parametrize(
    "options",
    [{"engine": "transformers"}, {"fuse": False}, {"rule": "uniform"}],
)
def test_other_plans_are_for_transformers(options: dict[str, Any], table: Profile) -> None:
    resolved = resolve(Recipe.of(0.8, workloads=DECODE, latency="any", **options), SMOLLM2, table, USED)
    assert resolved.recipe.deployment.engine == "transformers"
    assert resolved.steps == {}


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"forms": ("low_rank", "latent:2")}, PlanError, "form latent:2 for engine vllm"),
        ({"fuse": False}, GacError, "fuse=False for engine vllm"),
        (
            {"forms": "heads"},
            PlanError,
            "forms low_rank, narrow, narrow_pair, skip, experts, which it runs",
        ),
    ],
)
def test_what_no_engine_runs_is_refused(options: Any, error: Any, named: str, table: Profile) -> None:
    with pytest.raises(error, match=named):
        resolve(Recipe.of(0.8, workloads=DECODE, engine="vllm", **options), SMOLLM2, table, USED)


def test_a_scheme_is_served_where_a_storage_with_a_kernel_holds_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    assert VLLM.unserved((), ("bf16", "w4a16", "fp8", "fp8_block")) is None
    assert VLLM.unserved((), ("w4a16", "nvfp4a16")) == "scheme nvfp4a16"
    assert VLLM.unserved((), ("mxfp4a16",)) == "scheme mxfp4a16"
    monkeypatch.setattr("gac.plan.engines.scheme_named", lambda name: SimpleNamespace(storage=None))
    assert VLLM.unserved((), ("bf16", "w4a16")) == "scheme w4a16"


def test_what_no_kernel_of_the_plugin_reads_is_named_before_anything_is_measured(table: Profile) -> None:
    odd = LlamaConfig(hidden_size=72, intermediate_size=144, num_hidden_layers=1, num_attention_heads=4, vocab_size=96)
    expected = re.escape("weights for the kernels of w4a16 (a weight has 72 columns, no multiple of 32)")
    with pytest.raises(PlanError, match=expected):
        resolve(Recipe.of(1.0, workloads=DECODE, engine="vllm", schemes="w4a16", latency="any"), odd, table, USED)
    for options in ({"engine": "transformers", "schemes": "w4a16"}, {"engine": "vllm", "schemes": ("w4a16", "bf16")}):
        resolve(Recipe.of(1.0, workloads=DECODE, latency="any", **options), odd, table, USED)


def test_ranks_in_few_bits_are_those_that_the_kernels_of_the_plugin_read() -> None:
    ranks, weight = np.arange(1, 100), Weight("q", 128, 256)
    of_pairs = partial(runnable_dims, form_named("low_rank"), scheme_named("w4a16"), weight, ranks)
    assert of_pairs(engine=VLLM).tolist() == [32, 64, 96]
    assert of_pairs().tolist() == ranks.tolist()


def test_the_command_for_unknown_latencies_measures_the_engine() -> None:
    asked = Recipe.of(0.8, workloads=DECODE, engine="vllm", latency=1.0)
    with pytest.raises(ProfileError, match=f"gac profile --model NAME --workload {DECODE} --engine vllm -o"):
        resolve(asked, SMOLLM2, Profile.load("nvidia-h200"), USED)


def test_a_latency_out_of_reach_is_answered_with_the_least_fraction(table: Profile) -> None:
    def allowing(fraction: float) -> Recipe:
        return Recipe.of(1.0, workloads=DECODE, engine="vllm", forms="low_rank", latency=fraction)

    with pytest.raises(BudgetError, match=f"a latency limit of 0.01 of the dense model for {DECODE}") as refused:
        resolve(allowing(0.01), SMOLLM2, table, USED)
    least = float(refused.value.expected.removeprefix("at least ").partition(",")[0])
    resolve(allowing(least), SMOLLM2, table, USED)
    with pytest.raises(BudgetError, match="a latency limit of"):
        resolve(allowing(least - 1e-5), SMOLLM2, table, USED)


@pytest.mark.parametrize("options", [{}, {"engine": "vllm"}])
def test_an_unknown_workload_leaves_the_dense_latency_of_another_as_it_is(options: dict[str, Any]) -> None:
    table, latencies = Profile.load("nvidia-h100-80gb-hbm3"), []
    for workloads in (["prefill:1x1024"], ["prefill:1x1024", "decode:3@777"]):
        recipe = Recipe.of(0.8, workloads=workloads, latency="any", **options)
        resolved = resolve(recipe, SMOLLM2, table, USED)
        latencies.append(DenseModel.of(resolved.sites, table, resolved.recipe.deployment).latency_ns)
    assert latencies[1] == (*latencies[0], None)


PLAIN: dict[str, Any] = {"forms": ["low_rank"], "workloads": [PREFILL], "align": False, "refit": "none", "slack": 0}


def problem(steps: dict[str, Step], **options: Any) -> Problem:
    """Two sites of 6 µs each when dense; the plugin's step takes 30 µs, the engine's own 32 µs."""
    plain_rows = rows(8, APART)
    table = profile([*plain_rows, *(replace(row, operator=f"served_{row.operator}") for row in plain_rows)])
    recipe = Recipe.of(**PLAIN | {"latency": "any", "budget": 1.0} | options)
    return Problem(sites_of(), CURVES, table, recipe, MEASURED, steps=steps)


WHOLE = {PREFILL: Step(dense_ns=32_000, served_ns=30_000)}


def test_latencies_and_limits_are_of_whole_steps() -> None:
    of_steps = problem(WHOLE)
    assert of_steps.dense.latency_ns == (32_000,)
    assert of_steps.dense.rest_ns == (18_000,)
    timed = decide(of_steps).plan.workloads[0]
    alone = decide(problem({})).plan.workloads[0]
    assert (timed.dense_ns, timed.rest_ns, timed.plan_ns) == (32_000, 18_000, (alone.plan_ns or 0) + 18_000)
    plan = decide(problem(WHOLE, latency={PREFILL: 0.8})).plan
    assert plan.limits[-1].limit == 25_600
    assert 24_600 < plan.limits[-1].used <= 25_600


def test_a_frontier_over_latency_is_of_whole_steps() -> None:
    result = frontier(problem(WHOLE, engine="vllm"), points=4, limit=PREFILL)
    assert result.dense_ns == (32_000,)
    assert f"{PREFILL} tokens/s" in str(result)
    assert f"tokens/s of whole steps in vllm; dense 250,000 ({PREFILL})" in str(result)
    for number, point in enumerate(result.points):
        assert point.latency_ns[0] is not None
        assert 18_000 < point.latency_ns[0] <= point.limit <= 32_000
        assert result.plan(number).workloads[0].plan_ns == point.latency_ns[0]


def test_the_summary_and_the_page_say_tokens_a_second() -> None:
    plan = decide(problem(WHOLE, engine="vllm")).plan
    timed = plan.workloads[0]
    assert timed.plan_ns
    rates = f"; {8e9 / timed.plan_ns:,.0f} tokens/s of 250,000 in vllm"
    assert rates in plan.summary()
    assert rates in report_page(Sources(plan))
    alone = decide(problem({}, engine="vllm")).plan
    assert "; GEMMs alone: the profile has no steps in vllm" in alone.summary()


def test_the_engine_s_kernels_are_looked_up() -> None:
    weight = sites_of()[0].weights[0]
    plain = profile(
        [measured("linear", 5000, m=1, k=SIDE, n=SIDE), measured("served_linear", 3000, m=1, k=SIDE, n=SIDE)]
    )

    full = DENSE.full(weight)
    for engine, ns in (("transformers", 5000), ("vllm", 3000)):
        timing = Timing(plain, (Workload.parse(DECODE),), engine=ENGINES[engine])
        assert timing.of_weight(DENSE, weight, np.array([full]))[0].tolist() == [[ns]]


def test_the_engine_s_kernels_are_looked_up_for_the_part_on_each_gpu() -> None:
    weight = Weight("q_proj", SIDE, SIDE, input_group="x")
    half = {"m": 1, "k": SIDE, "n": SIDE // 2}
    plain = profile([measured("linear", 5000, **half), measured("served_linear", 3000, **half)])
    for engine, ns in (("transformers", 5000), ("vllm", 3000)):
        timing = SplitTiming(plain, (Workload.parse(DECODE),), 2, ENGINES[engine])
        assert timing.of_weight(DENSE, weight, np.array([DENSE.full(weight)]))[0].tolist() == [[ns]]
        assert timing.sound(DENSE, weight, np.array([DENSE.full(weight)]), fused=False).all()


@pytest.mark.parametrize(("engine", "shared"), [("transformers", 0), ("vllm", 2048)])
def test_the_plugin_shares_gemms_of_any_size(engine: str, shared: int) -> None:
    weight = Weight("gate", 2048, 64)
    timing = Timing(None, (Workload.parse("prefill:8x1024"),), engine=ENGINES[engine])
    assert timing.shared_width(DENSE, weight, np.array([DENSE.full(weight)])).tolist() == [[shared]]


def test_gemms_take_the_scale_of_a_step_and_a_limit_of_1_allows_the_plugin() -> None:
    scaled = problem({PREFILL: Step(dense_ns=32_000, served_ns=30_000, scale=Fraction(3, 2))})
    assert scaled.dense.gemms_ns == (18_000,)
    assert scaled.dense.rest_ns == (12_000,)
    alone = decide(problem({})).plan.workloads[0].plan_ns or 0
    assert decide(scaled).plan.workloads[0].plan_ns == alone * 3 // 2 + 12_000
    slower = {PREFILL: Step(dense_ns=29_000, served_ns=30_000)}
    for share, limit in ((1.0, 12_000), (0.9, 26_100 - 18_000)):
        limited = problem(slower, latency={PREFILL: share})
        assert limited.dense.allowed(limited.recipe)[f"ns:{PREFILL}"] == limit


def test_gemms_in_a_scheme_take_the_scale_of_a_step_in_it() -> None:
    scales = {"w4a16": Fraction(2), "fp8": Fraction(1, 2)}
    step = Step(dense_ns=32_000, served_ns=30_000, scale=Fraction(3, 2), in_schemes=scales)
    assert [step.scale_in(name) for name in ("bf16", "w4a16", "fp8", "w8a8")] == [
        step.scale,
        *scales.values(),
        step.scale,
    ]


@pytest.mark.parametrize(("stored_ns", "expected"), [(700_000.0, True), (None, False)])
def test_a_step_in_a_scheme_is_predicted_as_it_was_measured(stored_ns: float | None, expected: bool) -> None:
    run, scheme = Recipe.of(workloads=DECODE, engine="vllm").deployment, scheme_named("w8a16")
    table = table_of(1.25, stored={} if stored_ns is None else {scheme: stored_ns})
    steps = engine_steps(SMOLLM2, run, table, ("bf16", scheme.name))
    assert (scheme.name in steps[DECODE].in_schemes) is expected
    model = DenseModel.of(family_of(SMOLLM2).sites(SMOLLM2), table, run, steps, scheme)
    rest = DenseModel.of(family_of(SMOLLM2).sites(SMOLLM2), table, run, steps).rest_ns[0]
    if expected:
        assert model.gemms_ns[0] is not None
        assert model.gemms_ns[0] + rest == pytest.approx(stored_ns, rel=1e-3)


@pytest.mark.parametrize("saved", [0.0, -1.0])
def test_gemms_of_a_step_that_gains_nothing_count_nothing(saved: float) -> None:
    run = Recipe.of(workloads=DECODE, engine="vllm").deployment
    assert engine_steps(SMOLLM2, run, table_of(saved)) == {DECODE: Step(1_200_000, 1_000_000, Fraction(0))}


# --- launches ---------------------------------------------------------------------------------------------------------

LAYER = family_of(SMOLLM2).sites(SMOLLM2)[:5]


def test_the_last_step_is_the_model_of_pairs() -> None:
    operations = steps_of(SMOLLM2, Workload.parse(DECODE))
    assert [operation.operator for operation in operations] == [*STEPS[:2], "served_step", "paired_step"]
    assert operations[3].shape == operations[1].shape == operations[0].shape


def test_the_rank_of_those_pairs_is_half_of_that_at_which_they_are_as_large() -> None:
    ranks = [paired_rank(weight) for site in LAYER for weight in site.weights]
    assert ranks == [144, 72, 72, 144, 208, 208, 208]
    assert paired_rank(Weight("small", 12, 12)) == 8


def further_gemms_ns() -> float:
    """Return what the GEMMs of SmolLM2 in pairs take beyond the dense ones; o and down take the same in the table."""
    dense = linear_ns(576, 576 + 2 * 192) + linear_ns(576, 2 * 1536)
    attention = linear_ns(576, 144 + 2 * 72) + linear_ns(144, 576) + 2 * linear_ns(72, 192)
    mlp = linear_ns(576, 2 * 208) + 2 * linear_ns(208, 1536)
    return 30 * (attention + mlp - dense)


@pytest.mark.parametrize("scale", [0.0, 1.25])
@pytest.mark.parametrize(("launch_ns", "expected"), [(700, 700), (0, 0), (-5, 0), (None, 0)])
def test_a_launch_is_what_pairs_take_beyond_their_gemms(scale: float, launch_ns: int | None, expected: int) -> None:
    taken = None if launch_ns is None else 1_000_000 + scale * further_gemms_ns() + 30 * 7 * launch_ns
    run = Recipe.of(workloads=DECODE, engine="vllm").deployment
    steps = engine_steps(SMOLLM2, run, table_of(scale, taken))
    assert steps == {DECODE: Step(1_200_000, 1_000_000, Fraction(scale), expected)}


def test_launches_of_unknown_gemms_cost_nothing() -> None:
    operations = steps_of(SMOLLM2, Workload.parse(DECODE))
    times = zip(operations, (2e6, 1e6, 1e6, 9e6), strict=True)
    table = make_profile(Measurement.of(Point(step), ns, 0.0, 10, 1980, True) for step, ns in times)
    run = Recipe.of(workloads=DECODE, engine="vllm").deployment
    assert engine_steps(SMOLLM2, run, table) == {DECODE: Step(2_000_000, 1_000_000)}


@pytest.mark.parametrize(
    ("form", "dims", "launches"),
    [
        ("dense", [576], [0]),
        ("low_rank", [0, 64, 128], [0, 700, 700]),
        ("narrow", [768], [0]),
        ("narrow_pair:768", [64], [700]),
        ("skip", [0], [0]),
    ],
)
def test_every_pair_has_a_launch(form: str, dims: list[int], launches: list[int], table: Profile) -> None:
    """Weights that share a GEMM, and one that does not; gate, up and down have all of these forms."""
    mlp = fuse_sites(LAYER)[-1]
    for position, site in ((0, mlp), (0, mlp.with_fusion(False)), (2, mlp)):
        latency = []
        for launch_ns in (0, 700):
            step = Step(1_200_000, 1_000_000, Fraction(1, 2), launch_ns)
            timing = Timing(table, (Workload.parse(DECODE),), engine=VLLM, steps={DECODE: step})
            rows = weight_candidates(
                site, position, form_named(form), scheme_named("bf16"), np.array(dims), None, timing
            )
            latency.append(rows.latency[:, 0])
        assert (latency[0] >= 0).all()
        assert (latency[1] - latency[0]).tolist() == launches


def test_an_unknown_latency_stays_unknown() -> None:
    timing = Timing(None, (Workload.parse(DECODE),), steps={DECODE: Step(2, 1, launch_ns=700)})
    rows = weight_candidates(LAYER[0], 0, PAIR, scheme_named("bf16"), np.array([4]), None, timing)
    assert rows.latency.tolist() == [[-1]]


@pytest.mark.parametrize(("launch_ns", "form"), [(0, "low_rank"), (10_000, "narrow")])
def test_a_limit_of_1_excludes_pairs_whose_launches_are_dear(launch_ns: int, form: str) -> None:
    """An MLP of two weights, whose pairs lose less than fewer neurons do."""
    mlp = Site("mlp", 0, "mlp", (Weight("up", SIDE, SIDE, neurons="out"), Weight("down", SIDE, SIDE, neurons="in")))
    narrow = [
        measured("linear", 500 * size, m=8, k=k, n=n)
        for size in range(1, SIDE)
        for k, n in ((SIDE, size), (size, SIDE))
    ]
    curves = curves_by(
        low_rank=dict.fromkeys(("up", "down"), CURVE), narrow={"down": LossCurve(np.linspace(20.0, 0.0, SIDE + 1))}
    )
    options: dict[str, Any] = {"forms": ["low_rank", "narrow"], "budget": 0.75, "latency": {PREFILL: 1.0}}
    small = replace(
        problem({PREFILL: Step(32_000, 30_000, launch_ns=launch_ns)}, **options),
        sites=(mlp,),
        curves=curves,
        profile=profile([*rows(8, [1000, 2000, 3000, 4000, 5000, 6000]), *narrow]),
    )
    plan = decide(small).plan
    assert {weight.form for weight in plan.weights} == {form}
    assert (plan.workloads[0].plan_ns or 0) <= 32_000


# --- weights that share a GEMM --------------------------------------------------------------------------------------


def shared(**asked: Any) -> Problem:
    """Two weights of one input: each takes 6 µs by itself, both together 7 µs."""
    table = profile([*rows(8, APART), measured("linear", TOGETHER, m=8, k=SIDE, n=2 * SIDE)])
    recipe = Recipe.of(**PLAIN | {"budget": 0.8, "latency": "any", "fuse": False} | asked)
    sites = as_planned(sites_of("x"), ["low_rank"], recipe.deployment.fuse)
    return Problem(sites, CURVES, table, recipe, MEASURED)


@pytest.mark.parametrize("fuse", [False, "auto", True])
def test_the_dense_model_has_shared_gemms(fuse: Any) -> None:
    plan = decide(shared(fuse=fuse)).plan
    assert plan.workloads[0].dense_ns == TOGETHER
    assert RULES.get("uniform").decide(shared(fuse=False, rule="uniform")).plan.workloads[0].dense_ns == TOGETHER


def test_a_plan_is_no_slower_than_shared_gemms() -> None:
    """Two weights at 4 of 6 ranks take 8 µs one by one; the limit is 7 µs, not 12."""
    plan = decide(shared(budget=1.0, latency={PREFILL: 1.0})).plan
    assert plan.limits[-1].total == TOGETHER
    assert (plan.workloads[0].plan_ns or 0) <= TOGETHER


DECODE_3 = "decode:3@8"
BOTH = measured("linear", TOGETHER, m=8, k=SIDE, n=2 * SIDE)


@pytest.mark.parametrize(
    ("workloads", "table", "dense_ns"),
    [
        ([PREFILL], rows(8, APART), (2 * APART[-1],)),
        ([PREFILL, DECODE_3], [*rows(8, APART), BOTH], (TOGETHER, None)),
        ([PREFILL, DECODE_3], [*rows(8, APART), *rows(3, APART), BOTH], (2 * APART[-1],) * 2),
    ],
    ids=["no shared shape", "an unknown workload", "no shared shape of a known workload"],
)
def test_without_the_shared_shape_it_runs_gemm_by_gemm(workloads: Any, table: Any, dense_ns: Any) -> None:
    assert replace(shared(workloads=workloads), profile=profile(table)).dense.latency_ns == dense_ns


def test_what_is_said_is_of_shared_gemms() -> None:
    plan = decide(shared()).plan
    assert plan.workloads[0].plan_ns == 9000
    assert latencies(plan) == ["prefill:1x8: 0.009 ms of 0.007 ms dense (1.286x; 2 measured, 0 interpolated)"]
    assert "9.0 µs of 7.0 µs" in _time(plan, plan.workloads[0])[2]
    marks = charts(Sources(plan, "plan", {}, None, None, None))[-1]["marks"]
    assert [mark.letter for mark in marks] == ["D", "P"]
    result = frontier(shared(budget=1.0), points=5)
    assert result.dense_ns == (TOGETHER,)
    assert result.plan(-1).workloads[0].dense_ns == TOGETHER
    for wrong in ((0,), (7000, 7000), ()):
        with pytest.raises(PlanError, match="frontier states dense_ns"):
            replace(result, dense_ns=wrong)
