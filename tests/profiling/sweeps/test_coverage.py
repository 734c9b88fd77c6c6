"""The shapes that are measured: enough for every dim that an allocation looks up, and not too many."""

from itertools import pairwise, product

import numpy as np
import pytest
from transformers import AutoConfig

from gac.core.arrays import alignment_class
from gac.core.errors import PlanError, ProfileError
from gac.core.workloads import Workload
from gac.forms import form_named
from gac.forms.low_rank import low_rank
from gac.models.shapes import SHAPES, Shapes
from gac.profiling.operators import OPERATORS, operation
from gac.profiling.records import Point
from gac.profiling.sweeps.collectives import collective_points
from gac.profiling.sweeps.coverage import every_dim, few_dims, fused_points, general_points, model_points, spaced_dims
from gac.profiling.table import interpolate
from gac.schemes import SCHEMES
from gac.schemes.base import Bf16
from tests.models.small import NEURONS, small_config
from tests.profiling.examples import COLLECTIVES, make_sweep

LLAMA = model_points("llama-3-8b")
GENERAL = general_points()

# What each weight shape of Llama-3-8B is looked up as: operator, other axes, the axis that moves, its largest dim.
LLAMA_AXES = [
    ("low_rank", {"k": 4096, "n": 4096}, "r", 2047),
    ("low_rank", {"k": 4096, "n": 1024}, "r", 819),
    ("low_rank", {"k": 4096, "n": 14336}, "r", 3185),
    ("low_rank", {"k": 14336, "n": 4096}, "r", 3185),
    ("linear", {"k": 4096}, "n", 14335),
    ("linear", {"n": 4096}, "k", 14335),
]


def dims_along(points: tuple[Point, ...], name: str, axis: str, **fixed: int) -> list[int]:
    axes = (point.operation.axes for point in points if (point.operation.operator, point.cache) == (name, "cold"))
    return sorted(sizes[axis] for sizes in axes if fixed.items() <= sizes.items())


def test_models_have_points_that_can_be_afforded() -> None:
    assert 1700 <= len(LLAMA) == len(set(LLAMA)) <= 1900
    assert {point.operation.axes["m"] for point in LLAMA} == {1, 1024}
    assert all(len(model_points(name)) < 3000 for name in sorted(SHAPES)[::3])


@pytest.mark.parametrize("rows", [1, 1024])
@pytest.mark.parametrize(("name", "fixed", "axis", "largest"), LLAMA_AXES)
def test_every_multiple_of_8_has_a_latency_and_every_alignment_class_is_compared(
    name: str, fixed: dict[str, int], axis: str, largest: int, rows: int
) -> None:
    dims = np.array(dims_along(LLAMA, name, axis, m=rows, **fixed))
    latency, _ = interpolate(make_sweep(dict.fromkeys(dims.tolist(), 1.0)), np.arange(64, largest + 1, 8))
    assert (latency == 1).all()
    for step in (1, 2, 4, 8, 16, 32):
        padded = -(-dims[alignment_class(dims) == step] // 64) * 64
        assert np.isin(padded, dims).sum() >= 3, step


def test_a_width_counts_twice_where_gate_and_up_are_one_weight() -> None:
    points = model_points(small_config("phi3"), forms=("narrow",))
    narrow = every_dim(NEURONS - 1)
    assert dims_along(points, "linear", "k", m=1, n=64) == sorted({*narrow, 64, NEURONS})
    assert dims_along(points, "linear", "n", m=1, k=64) == sorted({*(2 * dim for dim in narrow), 64, 128, 2 * NEURONS})


def test_fused_weights_run_one_gemm_and_second_factors() -> None:
    points = fused_points("llama-3-8b")
    widths = dims_along(points, "linear", "n", m=1, k=4096)
    assert {6144, 28672} <= set(widths)
    assert max({*dims_along(points, "linear", "k", m=1024, n=1024)} - {4096}) == 816
    assert max({*dims_along(points, "linear", "k", m=1, n=14336)} - {4096}) == 3184
    assert {point.operation.operator for point in points} == {"linear"}
    assert len(set(points) - set(LLAMA)) < 700


def test_what_is_fused_is_measured_in_schemes_too() -> None:
    plain, points = fused_points("llama-3-8b"), fused_points("llama-3-8b", schemes=("w4a16", "fp8"))
    dtypes = ("bf16", "w4a16", "fp8_dynamic")
    bf16, w4a16, fp8 = ([point.operation for point in points if point.dtype == dtype] for dtype in dtypes)
    assert bf16 == [point.operation for point in plain]
    assert {point.axes["n"] for point in w4a16} >= {320, 6144, 28672, *few_dims(28672)}
    assert fp8 == [point for point in w4a16 if all(size % 16 == 0 for axis, size in point.shape if axis != "m")]
    assert len(bf16) + len(w4a16) + len(fp8) == len(points)


@pytest.mark.parametrize("largest", [64, 287, 1023, 4095, 28672])
@pytest.mark.parametrize(
    ("dims_of", "step"), [(spaced_dims, 8), (few_dims, 64), (lambda n: [d for d in spaced_dims(n) if d % 16 == 0], 16)]
)
def test_chosen_dims_leave_no_multiple_of_the_step_out(dims_of, step: int, largest: int) -> None:
    dims = dims_of(largest)
    latency, _ = interpolate(make_sweep(dict.fromkeys(dims, 1.0)), np.arange(step, largest + 1, step))
    assert (latency == 1).all()
    assert all(8 <= low < high <= largest for low, high in pairwise(dims))
    assert dims_of is not few_dims or len(dims) <= 71


def test_a_config_will_do_and_of_a_multimodal_one_the_text_part() -> None:
    tiny = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    text = {**tiny, "head_dim": 32, "num_hidden_layers": 2}
    both = AutoConfig.for_model("gemma3", text_config=text)
    assert model_points(both) == model_points(Shapes("gemma3_text", **text))
    assert Point(low_rank(1, 64, 16, 64)) in model_points(both)


def test_a_form_that_no_table_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(form_named("latent").cache), "axis", lambda cache, weight: None)
    with pytest.raises(ProfileError, match="form latent; expected a form whose latency is measured"):
        model_points("llama-3-8b", forms=["low_rank", "latent"])


@pytest.mark.parametrize("points", [GENERAL, general_points("fp16", (8, 0))], ids=["bf16 sm_90", "fp16 sm_80"])
def test_a_general_sweep_has_about_5000_points_of_many_operators(points: tuple[Point, ...]) -> None:
    assert 4500 <= len(points) == len(set(points)) <= 5500
    names = {point.operation.operator for point in points}
    assert {"linear", "low_rank", "batched_gemm", "int4_linear", "sdpa", "sdpa_flash_causal", "copy"} <= names
    assert not {"latent_attention", *COLLECTIVES} & names


def test_collectives_of_every_width_up_to_the_widest_layers_and_columns_that_all_gpus_share() -> None:
    points = collective_points(4, [Workload.parse("prefill:2x64"), Workload.parse("decode:8@64")])
    for name, m in product(COLLECTIVES, (8, 128)):
        ordered = dims_along(points, name, "n", m=m, gpus=4)
        assert all(operation(name, gpus=4, m=m, n=n) for n in ordered)
        assert (ordered[0], ordered[-1]) == (8 if name == "all_reduce" else 32, 32768)
        assert all(1.3 < after / before <= 1.5 for before, after in pairwise(ordered))


def test_a_model_is_measured_in_each_scheme_beside_its_16_bits() -> None:
    points = model_points("llama-3-8b", schemes=("w4a16", "w4a16:64"))
    assert points[: len(LLAMA)] == LLAMA
    w4a16, in_64 = ([point.operation for point in points if point.dtype == dtype] for dtype in ("w4a16", "w4a16:64"))
    assert len(points) == len(LLAMA) + 2 * len(w4a16) < 3 * len(LLAMA)
    assert w4a16 == in_64
    assert {point.operation for point in model_points("llama-3-8b", forms=())} <= {*w4a16}


@pytest.mark.parametrize("points_of", [lambda **options: model_points("llama-3-8b", **options), general_points])
def test_only_what_a_scheme_runs_is_measured_in_it(points_of) -> None:
    points = [point for point in points_of(schemes=("fp8",)) if point.dtype == "fp8_dynamic"]
    assert {point.operation.operator for point in points} == {"linear", "low_rank"}
    for point in points:
        axes = point.operation.axes
        assert not any(axes[name] % 16 for name in "krn" if name in axes)
        assert OPERATORS.get(point.operation.operator).refusal(axes, point.dtype) is None


class Strange(Bf16):
    name = "strange"
    dtype = "strange"


def test_a_scheme_that_is_not_known_or_not_timed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="scheme 'w99a16' is unknown"):
        model_points("smollm2", schemes=("w99a16",))
    monkeypatch.setitem(SCHEMES._known, "strange", Strange())
    with pytest.raises(ProfileError, match="scheme strange, whose dtype in tables is 'strange'"):
        general_points(schemes=("strange",))
