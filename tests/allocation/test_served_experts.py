"""Plans for vLLM of experts in fewer numbers, narrower and in fp8, beside attention in any scheme."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from gac.allocation.decide import decide
from gac.allocation.dense import DenseModel
from gac.allocation.dims import full_dim, runnable_dims
from gac.allocation.problem import Problem
from gac.allocation.resolve import engine_steps, resolve
from gac.core.errors import PlanError
from gac.core.workloads import Workload
from gac.forms import DENSE, form_named
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.forms.planned_sites import as_planned, targeted_sites
from gac.models.sites import Site
from gac.plan.engines import ENGINES, MIXTURE_STEPS, VLLM, sites_in, steps_of
from gac.plan.recipe import Recipe
from gac.profiling.operators import OPERATORS
from gac.profiling.records import Measurement, Point
from gac.profiling.sweeps.coverage import fused_points, model_points
from gac.profiling.table import Profile
from gac.schemes import scheme_named
from tests.allocation.small_problems import MEASURED
from tests.allocation.test_engines import USED
from tests.headers import make_profile
from tests.models.small import EXPERT_NEURONS, EXPERTS, small_config
from tests.refused import assert_refused

DECODE = "decode:1@64"
FORMS, SCHEMES = ("experts",), ("bf16", "fp8", "w4a16:64")
CONFIG = small_config("mixtral")
DENSE_NS, SERVED_NS, FP8_NS = 3_000_000, 2_500_000, 2_100_000


def nanoseconds(point: Point) -> float:
    """By the numbers that are read; half of that in fp8."""
    axes = point.operation.axes
    ns = 1000 + 10 * axes["k"] * axes.get("n", 1) * axes.get("e", 1)
    return ns / 2 if point.dtype == "fp8_dynamic" else ns


def points_in(engine: str, schemes: Sequence[str]) -> list[Point]:
    asked = CONFIG, [Workload.parse(DECODE)], "bf16", FORMS, schemes
    points, runs_in = [*model_points(*asked), *fused_points(*asked)], ENGINES[engine]
    run = [point for point in points if runs_in.has_kernels(point.operation, point.dtype)]
    return [replace(point, operation=runs_in.operation(point.operation, point.dtype)) for point in run]


@pytest.fixture(scope="module")
def table() -> Profile:
    timed = {point: nanoseconds(point) for point in points_in("vllm", SCHEMES[1:])}
    steps = zip(steps_of(CONFIG, Workload.parse(DECODE)), (DENSE_NS, SERVED_NS), strict=False)
    timed |= {Point(step): float(ns) for step, ns in steps}
    timed[Point(steps_of(CONFIG, Workload.parse(DECODE))[1], "fp8_dynamic")] = float(FP8_NS)
    return make_profile(Measurement.of(point, ns, 0.0, 10, 1980, True) for point, ns in timed.items())


@pytest.mark.parametrize(
    ("forms", "schemes", "expected"),
    [
        (("experts",), ("bf16", "fp8"), None),
        (("experts",), ("fp8",), None),
        (("low_rank", "experts"), ("bf16", "w4a16"), None),  # of attention
        (("experts",), ("w4a16", "fp8"), None),
        (("low_rank", "experts"), ("w4a16", "w8a8"), "form experts in scheme w4a16"),
        (("low_rank",), ("w4a16",), None),
        (("experts",), ("bf16", "nvfp4a16"), "scheme nvfp4a16"),
    ],
)
def test_experts_need_one_scheme_that_the_plugin_runs_them_in(
    forms: Sequence[str], schemes: Sequence[str], expected: str | None
) -> None:
    assert VLLM.unserved(forms, schemes) == expected
    assert ENGINES["transformers"].unserved(forms, schemes) is None


def test_what_can_be_had_is_named(table: Profile) -> None:
    recipe = Recipe.of(0.8, workloads=DECODE, engine="vllm", forms=FORMS, schemes=["w4a16:64"], latency="any")
    assert_refused(
        lambda: resolve(recipe, CONFIG, table, USED),
        "form experts in scheme w4a16:64 for engine vllm",
        "experts in bf16, fp8",
        error=PlanError,
    )


@pytest.mark.parametrize(("engine", "expected"), [("vllm", {"bf16", "fp8"}), ("transformers", {*SCHEMES})])
def test_experts_take_the_schemes_that_their_engine_runs(engine: str, expected: set[str]) -> None:
    weights = [weight for site in targeted_sites(CONFIG, FORMS) for weight in site.weights]
    stack, query = next(weight for weight in weights if weight.experts), weights[0]

    def taking(form: str) -> set[str]:
        run = {"gpus": 1, "engine": ENGINES[engine]}
        dims = np.array([EXPERTS // 2])
        return {
            name for name in SCHEMES if len(runnable_dims(form_named(form), scheme_named(name), stack, dims, **run))
        }

    assert taking("experts") == taking("experts:32") == expected
    in_scheme = scheme_named("w4a16:64")
    assert len(runnable_dims(DENSE, in_scheme, query, full_dim(query), engine=ENGINES[engine]))


def test_shapes_of_experts_are_measured_in_what_the_plugin_runs() -> None:
    served = {(point.dtype, *point.operation.shape) for point in points_in("vllm", SCHEMES) if is_of_experts(point)}
    assert {dtype for dtype, *_ in served} == {"bf16", "fp8_dynamic"}
    plain = [tuple(shape) for dtype, *shape in sorted(served) if dtype == "bf16"]
    assert plain == [tuple(shape) for dtype, *shape in sorted(served) if dtype == "fp8_dynamic"]
    assert {dict(shape)["n"] for shape in plain} > {EXPERT_NEURONS}
    assert {point.dtype for point in points_in("transformers", SCHEMES) if is_of_experts(point)} == {"bf16"}


def is_of_experts(point: Point) -> bool:
    return point.operation.operator.endswith("experts")


def test_a_step_in_fp8_has_experts_in_it_and_no_routers() -> None:
    in_fp8, in_few_bits = (
        {weight.name for site in sites_in(scheme_named(name), CONFIG) for weight in site.weights}
        for name in SCHEMES[1:]
    )
    assert {name.rpartition(".")[2] for name in in_fp8 - in_few_bits} == {"experts"}
    assert not any(name.endswith("gate") for name in in_fp8)


def test_the_step_in_fp8_is_predicted_as_it_was_measured(table: Profile) -> None:
    run, fp8 = Recipe.of(workloads=DECODE, engine="vllm").deployment, scheme_named("fp8")
    steps = engine_steps(CONFIG, run, table, SCHEMES)
    assert steps[DECODE].in_schemes.keys() == {"fp8"}
    sites = sites_in(fp8, CONFIG)
    rest = DenseModel.of(sites, table, run, steps).rest_ns[0]
    in_fp8 = DenseModel.of(sites, table, run, steps, fp8).gemms_ns[0]
    assert in_fp8 is not None
    assert in_fp8 + rest == pytest.approx(FP8_NS, rel=1e-3)


def test_counts_widths_and_schemes_are_chosen_with_known_latencies(table: Profile) -> None:
    recipe = Recipe.of(
        0.75, forms=FORMS, schemes=SCHEMES, workloads=DECODE, engine="vllm", latency={DECODE: 0.7}, refit="none"
    )
    resolved = resolve(recipe, CONFIG, table, USED)
    sites = as_planned(targeted_sites(CONFIG, FORMS), FORMS, True)
    plan = decide(
        Problem(
            sites, made_up_curves(sites), table, resolved.recipe, replace(MEASURED, params=10**6), steps=resolved.steps
        )
    ).plan
    stacks = [choice for choice in plan.weights if choice.weight.experts]
    assert {choice.scheme for choice in stacks} <= {"bf16", "fp8"}
    assert "fp8" in {choice.scheme for choice in stacks}
    timed = plan.workloads[0]
    assert timed.dense_ns == DENSE_NS
    assert timed.plan_ns is not None
    assert timed.plan_ns <= 0.7 * DENSE_NS


def made_up_curves(sites: Sequence[Site]) -> LossCurves:
    """Fewer and narrower experts lose more, 8 bits little, 4 bits more."""
    curves, added = {}, dict(zip(SCHEMES, (0.0, 0.01, 0.1), strict=True))
    for weight in (weight for site in sites for weight in site.weights):
        for scheme, loss in added.items():
            if weight.experts:
                gone = np.arange(EXPERTS, -1, -1.0)
                for form in form_named("experts").variants(weight):
                    thinner = 1 - form.routed_sizes(weight, EXPERTS)[1] / EXPERT_NEURONS
                    curves[form.name, scheme, weight.name] = LossCurve(loss + gone**2 + thinner)
            if loss:
                curves["dense", scheme, weight.name] = LossCurve(np.full(DENSE.full(weight) + 1, loss))
    return LossCurves(curves)


def test_the_plugin_s_step_of_a_mixture_is_timed_in_schemes() -> None:
    takes = {name: OPERATORS.get(name).takes("fp8_dynamic") for name in MIXTURE_STEPS}
    assert [*takes.values()] == [False, True, False]
