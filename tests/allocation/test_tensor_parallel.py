"""What each of several GPUs has of a weight, as planning counts it: the runtime's own word is the same."""

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gac
from gac.allocation.decide import attach_single_gpu_comparison, decide
from gac.allocation.latencies import INTERPOLATED, MEASURED, UNKNOWN
from gac.allocation.split_latencies import SplitTiming
from gac.compression.apply import empty_stored
from gac.core.errors import GacError, PlanError, ProfileError
from gac.core.operations import all_gather, all_reduce, linear
from gac.core.workloads import Workload
from gac.forms import form_named
from gac.forms.tensor_parallel import check_splits, divides, split_gemms, split_matrices, split_operations
from gac.models.families import family_of
from gac.models.modules import swap_in
from gac.models.shapes import SHAPES
from gac.models.sites import Weight
from gac.plan.plan import Plan, WeightChoice
from gac.profiling.operators import OPERATORS
from gac.profiling.records import Measurement, Point
from gac.profiling.sweeps.collectives import collective_points
from gac.profiling.sweeps.coverage import fused_points, model_points
from gac.profiling.table import Profile
from gac.runtime.parallel.division import cuts_of
from gac.schemes import scheme_named
from gac_extensions.lab.shapes.models import planner_of_shapes
from gac_extensions.lab.shapes.versions import Planner
from tests.headers import make_profile
from tests.models.small import small_config, small_model, weights_of

BF16, W4A16, FP8_BLOCK = map(scheme_named, ("bf16", "w4a16", "fp8_block"))
Q = Weight("q_proj", 4096, 4096, input_group="x")
K = Weight("k_proj", 1024, 4096, input_group="x", heads=8, cached=True)
O = Weight("o_proj", 4096, 4096, values="in", heads=32, to_residual=True)  # noqa: E741
DOWN = Weight("down_proj", 4096, 14336, neurons="in", to_residual=True)
GATE = Weight("gate_proj", 14336, 4096, neurons="out", input_group="y")


SECOND = linear(3, 512, 1024), all_gather(4, 3, 4096)


@pytest.mark.parametrize(
    ("form", "weight", "dim", "expected"),
    [
        ("dense", Q, 4096, [linear(3, 4096, 1024)]),
        ("dense", O, 4096, [linear(3, 1024, 4096), all_reduce(4, 3, 4096)]),
        ("low_rank", Q, 512, [linear(3, 4096, 128), all_gather(4, 3, 512), linear(3, 512, 1024)]),
        ("low_rank", O, 512, [linear(3, 1024, 512), all_reduce(4, 3, 512), *SECOND]),
        ("narrow", GATE, 8192, [linear(3, 4096, 2048)]),
        ("narrow", DOWN, 8192, [linear(3, 2048, 4096), all_reduce(4, 3, 4096)]),
        ("skip", DOWN, 0, []),
    ],
)
def test_a_gpu_runs_its_part_of_every_gemm_and_the_collective_that_follows(form, weight, dim, expected) -> None:
    assert list(split_operations(form_named(form), weight, dim, 3, 4)) == expected


def test_gpus_share_the_key_value_heads_that_are_fewer() -> None:
    dense, pair = form_named("dense"), form_named("low_rank")
    assert K.parts(4) == 4
    assert K.parts(16) == 8
    assert split_gemms(dense, K, 1024, 1, 16) == (linear(1, 4096, 128),)
    assert split_gemms(pair, K, 256, 1, 16) == (linear(1, 4096, 16), linear(1, 256, 128))


@pytest.mark.parametrize(
    ("form", "weight", "dim", "scheme", "gpus", "even"),
    [
        ("low_rank", Q, 510, BF16, 4, False),  # the rank is divided
        ("low_rank", O, 510, BF16, 4, True),  # it is not: its vectors are summed
        ("narrow", DOWN, 8190, BF16, 4, False),
        ("heads", K, 6, BF16, 4, False),  # of 128 numbers each: rows would divide
        ("heads", K, 4, BF16, 4, True),
        ("dense", DOWN, 4096, W4A16, 2, True),  # 7,168 columns in groups of 128
        ("narrow", DOWN, 8320, W4A16, 2, False),
        ("narrow", DOWN, 8448, W4A16, 2, True),
        ("low_rank", Q, 24, W4A16, 2, False),  # 12 rows, whose zero points are packed in eights
        ("low_rank", Q, 48, W4A16, 2, True),
        ("low_rank", Q, 48, scheme_named("w8a8"), 2, False),  # it runs multiples of 16
        ("narrow", DOWN, 8320, FP8_BLOCK, 2, False),
        ("narrow", DOWN, 8448, FP8_BLOCK, 2, True),
        ("low_rank", Q, 384, FP8_BLOCK, 2, False),  # 192 rows, in blocks of 128
        ("low_rank", Q, 512, FP8_BLOCK, 2, True),
        ("latent", K, 64, BF16, 2, True),  # groups of 4 of the 8 heads
        ("latent", K, 64, BF16, 4, False),
    ],
)
def test_what_each_gpu_has_is_equal_and_whole(form, weight, dim, scheme, gpus, even) -> None:
    named = form_named(form)
    weight = Weight(**{**vars(weight), "groups": 8}) if form == "heads" else weight
    assert divides(named, weight, dim, scheme, gpus) == even


@pytest.mark.parametrize(
    ("form", "weight", "expected"),
    [("low_rank", Q, [96, 48, 24]), ("low_rank", O, [96, 96, 96]), ("narrow", DOWN, [96, 48, 24])],
)
def test_alignment_counts_the_part_on_each_gpu(form, weight, expected) -> None:
    assert [WeightChoice(weight, form, 96).length_on(gpus) for gpus in (1, 2, 4)] == expected


LAYERS: tuple[dict[str, int], ...] = (
    {"low_rank": 16},
    {"latent:1": 16, "narrow": 128},
    {"head_dim": 16, "narrow_pair:128": 16},
    {"heads": 2, "skip": 0},
)


@pytest.mark.parametrize(
    ("family", "scheme", "gpus"), [("llama", "bf16", 4), ("llama", "w4a16:16", 2), ("glm", "bf16", 2)]
)
def test_what_runs_has_the_matrices_that_plans_count(family: str, scheme: str, gpus: int) -> None:
    config = small_config(family, num_hidden_layers=len(LAYERS))
    setattr(config, family_of(config).neurons, 192)
    choices = [_choice(weight, scheme, gpus) for weight in weights_of(config)]
    choices = [each for each in choices if each.divides(gpus)]
    model: Any = small_model(config)
    swap_in(model, {each.name: empty_stored(each, False, "meta", torch.float32) for each in choices})
    cuts = cuts_of(model, gpus - 1, gpus)
    assert not cuts.undivided
    assert len(choices) > 10
    for each in choices:
        expected = split_matrices(form_named(each.form), each.weight, each.dim, gpus)
        leaves = ("",) if len(expected) == 1 else (".first", ".second")
        assert tuple(_size(model, f"{each.name}{leaf}", cuts) for leaf in leaves) == expected


def _choice(weight: Weight, scheme: str, gpus: int) -> WeightChoice:
    """What the weight is in its layer; dense where the GPUs have no equal parts of that."""
    layer = int(weight.name.split(".layers.")[1].split(".")[0])
    dense = WeightChoice(weight, "dense", form_named("dense").full(weight), scheme)
    forms = [form for form in LAYERS[layer] if form != "skip" and form_named(form).applies_to(weight)]
    taken = [WeightChoice(weight, form, LAYERS[layer][form], scheme) for form in forms]
    return next((each for each in taken if each.divides(gpus)), dense)


def _size(model: Any, name: str, cuts: Any) -> tuple[int, int]:
    module, cut = model.get_submodule(name), cuts.matrices[name]
    blocks = getattr(getattr(module, "weight", None), "ndim", 2) == 3
    columns = module.weight.shape[2] if blocks else getattr(module, "matrix", (0, module.in_features))[1]
    rows = getattr(module, "matrix", (module.out_features, 0))[0]
    return cut.count or rows, cut.columns.stop - cut.columns.start if cut.columns else columns


@pytest.mark.parametrize(
    ("model", "gpus", "message"),
    [
        ("smollm2", 2, "tensor_parallel=2 for a model with 3 key-value heads; expected .* divides them: 1, 3. "),
        ("llama-3-8b", 64, "tensor_parallel=64 for a model with 8 key-value heads; expected a number of GPUs that "),
    ],
)
def test_heads_that_cannot_be_divided_are_named_with_the_numbers_of_gpus_that_divide_all(model, gpus, message) -> None:
    shapes = SHAPES[model]
    with pytest.raises(GacError, match=f"^{message}"):
        check_splits(family_of(shapes).sites(shapes), gpus)


def test_linear_attention_is_planned_for_one_gpu_only() -> None:
    with pytest.raises(GacError, match="tensor_parallel=2 for a qwen3_5_text, which transformers does not divide"):
        gac.allocate(small_model(small_config("qwen3_5_text")), 0.7, tensor_parallel=2, progress=False)


DECODE = Workload.parse("decode:1@1024")
GPUS = 4
LOW_RANK = form_named("low_rank")


def ns_of(point: Point) -> float:
    """1 us and a ns for each 1000 bytes, three times as long where a size is odd; 8 us and as much for a collective."""
    operation = point.operation
    moved = OPERATORS.get(operation.operator).bytes(operation.axes, point.dtype) / 1000
    if "gpus" in operation.axes:
        return 8000 + moved
    return (1000 + moved) * (3 if any(size % 8 for axis, size in operation.shape if axis != "m") else 1)


def table(collectives: bool = True) -> Profile:
    points = [*model_points("llama-3-8b", [DECODE]), *model_points("llama-3-8b", [DECODE], gpus=GPUS)]
    points += fused_points("llama-3-8b", [DECODE], gpus=GPUS)
    points += collective_points(GPUS, [DECODE]) if collectives else ()
    return make_profile([Measurement.of(item, ns_of(item), 0.0, 10, 1980, True) for item in dict.fromkeys(points)])


@pytest.fixture(scope="module")
def profile() -> Profile:
    return table()


@pytest.fixture(scope="module")
def planner(profile: Profile) -> Planner:
    return planner_of_shapes("llama-3-8b", [DECODE], profile, layers=1, gpus=GPUS)


@pytest.fixture(scope="module")
def plan(planner: Planner) -> Plan:
    problem = planner.problem_of(0.7, forms=("low_rank", "narrow"), fuse="auto", latency=None, slack=None)
    return attach_single_gpu_comparison(problem, decide(problem)).plan


def test_a_weight_takes_what_its_parts_and_its_collectives_take(profile: Profile) -> None:
    timing = SplitTiming(profile, (DECODE,), GPUS)
    for weight, runs in (
        (Q, [linear(1, 4096, 128), all_gather(GPUS, 1, 512), linear(1, 512, 1024)]),
        (O, [linear(1, 1024, 512), all_reduce(GPUS, 1, 512), linear(1, 512, 1024), all_gather(GPUS, 1, 4096)]),
    ):
        latency, how = timing.of_weight(LOW_RANK, weight, np.array([512]))
        assert latency[0, 0] == sum(ceil(ns_of(Point(item))) for item in runs)
        assert how[0, 0] == MEASURED


def test_between_measured_collectives_latency_is_read_off_the_line(profile: Profile) -> None:
    timing = SplitTiming(profile, (DECODE,), GPUS)
    rank = 64 * 23
    assert profile.point(all_gather(GPUS, 1, rank)) is None
    latency, how = timing.of_weight(LOW_RANK, Q, np.array([rank]))
    expected = sum(ns_of(Point(item)) for item in (linear(1, 4096, rank // GPUS), linear(1, rank, 1024)))
    assert latency[0, 0] == pytest.approx(expected + ns_of(Point(all_gather(GPUS, 1, rank))), rel=0.02)
    assert how[0, 0] == INTERPOLATED
    latency, _ = profile.latency("all_gather", {"gpus": GPUS, "m": 1}, "n", np.array([16, 40, 2**16]))
    assert latency.tolist() == [UNKNOWN, ceil(ns_of(Point(all_gather(GPUS, 1, 40)))), UNKNOWN]
    assert not any(item.operator.startswith("all_") for item in profile.sweeps())


def test_every_gpu_has_equal_sound_parts_and_the_plan_says_what_else_one_gpu_would_have(plan: Plan) -> None:
    assert plan.gpus == GPUS
    for item in plan.weights:
        assert item.divides(GPUS)
        divided = GPUS if item.form == "narrow" or (item.form, item.weight.split) == ("low_rank", "out") else 1
        assert item.form == "dense" or item.dim % (8 * divided) == 0
    assert plan.aligned_fraction == 1
    (run,) = plan.workloads
    assert (run.unknown, run.modelled) == (0, 0)
    assert run.plan_ns <= run.dense_ns
    assert plan.one_gpu is not None
    assert sum(plan.one_gpu.forms.values()) == plan.budget.total
    said = [line.strip() for line in plan.summary().splitlines()]
    each = plan.budget.used // GPUS
    assert any(line.startswith(f"split        over 4 GPUs, each with {each:,} parameters") for line in said)
    (theirs,) = plan.one_gpu.latency_ns
    assert theirs > run.plan_ns
    ratios = f"{theirs / run.dense_ns:.3f}x of dense, this one takes {run.plan_ns / run.dense_ns:.3f}x"
    assert f"decode:1@1024: it would take {ratios}" in said


def test_such_a_plan_is_kept_and_read_and_a_false_one_refused(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "false.json").write_text(text.replace('"tensor_parallel": 4', '"tensor_parallel": 3'))
    with pytest.raises(PlanError, match=r"plan for 3 GPUs has .* expected what they divide into equal parts"):
        Plan.load(tmp_path / "false.json")


def test_a_table_without_collectives_is_refused_with_the_command_that_measures_them(planner: Planner) -> None:
    alone = replace(planner, problem=replace(planner.problem, profile=table(collectives=False)))
    words = r"without all_reduce of 4,096 columns on 4 GPUs .* torchrun --nproc-per-node 4 -m gac profile --collectives"
    with pytest.raises(ProfileError, match=words):
        alone.plan_by_default(0.7)
    assert alone.plan(0.7).workloads[0].plan_ns is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel=3 for a model with 8 key-value heads; expected a number of GPUs"),
        ({"forms": ("latent",), "latency": "any"}, "form latent of weights that are split over 4 GPUs; "),
        ({"forms": ("head_dim", "narrow"), "align": 4096}, "form head_dim of .* over 4 GPUs, aligned to 4096; "),
    ],
)
def test_what_cannot_be_split_is_refused(options, message, planner: Planner) -> None:
    with pytest.raises(GacError, match=f"^{message}"):
        planner.plan_by_default(0.7, **options)


def test_what_is_gathered_from_a_shared_gemm_is_gathered_at_once(profile: Profile) -> None:
    timing = SplitTiming(profile, (DECODE,), GPUS)
    dense, dims = form_named("dense"), np.array([512, 1024])
    single, full = timing.shared_width(LOW_RANK, Q, dims), timing.shared_width(dense, Q, np.array([4096]))
    assert single.tolist() == [[128, 512], [256, 1024]]  # features of a GPU, and numbers of all
    assert full.tolist() == [[1024, 0]]
    assert timing.no_width(2).tolist() == [[0, 0], [0, 0]]
    latency, how = timing.of_shared(Q, single[:1] + single[1:] + full)
    runs = linear(1, 4096, 128 + 256 + 1024), all_gather(GPUS, 1, 512 + 1024)
    assert latency[0, 0] == pytest.approx(sum(ns_of(Point(item)) for item in runs), abs=2)
    assert how[0, 0] == MEASURED
    after, _ = timing.after_fused(LOW_RANK, Q, dims)
    assert after[:, 0].tolist() == [ceil(ns_of(Point(linear(1, dim, 1024)))) for dim in dims.tolist()]
