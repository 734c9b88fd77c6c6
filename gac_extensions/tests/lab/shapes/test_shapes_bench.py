"""Versions of known shapes timed in turns, with a fake timer, and their predictions, from a made-up table."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from gac.allocation.latencies import Timing, summed_attention
from gac.allocation.resolve import SLACK
from gac.core.errors import ModelError
from gac.core.workloads import Workload
from gac.evaluation import latency
from gac.evaluation.latency import Spread, Timed, weight_bytes
from gac.forms import form_named
from gac.forms.planned_sites import fuse_sites
from gac.models.families import family_of
from gac.models.shapes import SHAPES
from gac.plan.plan import WeightChoice
from gac.profiling.operators import OPERATORS
from gac.profiling.records import Measurement, Point
from gac.profiling.sweeps.collectives import collective_points
from gac.profiling.sweeps.coverage import fused_points, model_points
from gac.runtime.plain.modeling_gac import SkippedBlock
from gac.runtime.storage.modules import stored_modules
from gac_extensions.lab.shapes.bench import PARTS, Bench, Result, in_groups, predicted_latency, shares, without
from gac_extensions.lab.shapes.curve_library import CurveLibrary
from gac_extensions.lab.shapes.models import model_of_shapes, planner_of_shapes, variant, without_gemms
from gac_extensions.lab.shapes.versions import (
    DEFAULT,
    DENSE,
    FASTEST,
    FASTEST_IN_SCHEMES,
    FOR_ONE,
    FUSED,
    PLAIN,
    UNALIGNED,
    Planner,
    Version,
    fastest_in_schemes,
    fastest_versions,
    scheme_versions,
    versions_at,
    with_head,
)
from tests.allocation.test_latencies import table
from tests.evaluation.test_latency import DECODE, PREFILL, SMALL, CountingTimer, step_of
from tests.headers import make_profile

SCHEMES = ("w8a16", "w4a16")


def bytes_of(point: Point) -> float:
    return OPERATORS.get(point.operation.operator).bytes(point.operation.axes, point.dtype)


@pytest.fixture(scope="module")
def planner() -> Planner:
    """A planner whose table has every shape, with times by the bytes moved."""
    points = (*model_points(SMALL, [PREFILL, DECODE], schemes=SCHEMES), *fused_points(SMALL, [PREFILL, DECODE]))
    rows = [Measurement.of(each, 1000.0 + bytes_of(each), 0.0, 10, 1980, True) for each in dict.fromkeys(points)]
    return planner_of_shapes(SMALL, [DECODE], make_profile(rows), schemes=SCHEMES)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of_shapes(SMALL, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def versions(planner: Planner) -> dict[str, Version]:
    return {version.name: version for version in versions_at(planner, 0.7)}


def bench_of(planner: Planner, model: PreTrainedModel) -> Bench:
    timer: Any = CountingTimer()
    return Bench(model, planner.problem.sites, planner.problem.timing, planner.dense_versions(), timer)


def test_models_share_a_context_if_their_caches_have_one_shape(planner: Planner, model: PreTrainedModel) -> None:
    ids, contexts = latency.prepare(model, DECODE), latency.Contexts()
    weights = [weight for site in planner.problem.sites if site.layer == 1 for weight in site.weights]
    shorter = variant(model, [WeightChoice(weight, "head_dim", 8) for weight in weights if weight.values])
    skipping = variant(model, without(planner.problem.sites, "attentions"))
    context, of_shorter, of_skipping = (contexts.of(each, DECODE, ids) for each in (model, shorter, skipping))
    assert contexts.of(copy.deepcopy(model), DECODE, ids) is context
    assert of_shorter is not context
    assert of_skipping is not context
    assert 2 * of_skipping.nbytes == context.nbytes
    assert context.nbytes - of_shorter.nbytes == 4 * 2 * 8 * 4 * (32 - 8)
    assert latency.decode_step(shorter, of_shorter)().isfinite().all()


def test_variants_are_those_of_their_plans(planner: Planner, versions: Any, model: PreTrainedModel) -> None:
    copied = variant(model, versions[UNALIGNED].choices)
    assert (weight_bytes(model) - weight_bytes(copied)) // 4 == planner.problem.params - versions[UNALIGNED].params
    assert copied.get_input_embeddings().weight is model.get_input_embeddings().weight
    uniform = planner.uniform("w4a16")
    assert (uniform.name, {choice.scheme for choice in uniform.choices}) == ("uniform w4a16", {"w4a16"})
    quantised = variant(model, uniform.choices)
    assert len(stored_modules(quantised)) == len(uniform.choices)
    assert weight_bytes(model) - weight_bytes(quantised) == 4 * planner.problem.params - uniform.bytes
    fused = variant(model, planner.dense(fused=True).choices, fuse_sites(planner.problem.sites))
    assert torch.allclose(step_of(fused, PREFILL)(), step_of(model, PREFILL)(), atol=1e-4)


def test_the_fastest_in_schemes_lose_no_more_than_their_references(planner: Planner) -> None:
    references = scheme_versions(planner, 0.7, SCHEMES)
    versions, missing = fastest_in_schemes(planner, DECODE, SCHEMES, references)
    by_name = {version.name: version for version in (*references, *versions)}
    names = ["uniform w8a16", "uniform w4a16", DEFAULT, f"{DEFAULT}, in w8a16", f"{DEFAULT}, in w4a16"]
    assert missing == []
    assert list(by_name) == names + [f"{FASTEST_IN_SCHEMES} {name}" for name in names]
    for name in names:
        fastest = by_name[f"{FASTEST_IN_SCHEMES} {name}"]
        assert fastest.loss <= by_name[name].loss
        ns, limit = (version.table_ns[str(DECODE)] or 0 for version in (fastest, by_name[name]))
        assert 0 < ns <= limit or not name.startswith("uniform")  # other plans may have finer dims
    assert {choice.scheme for choice in by_name[f"{DEFAULT}, in w4a16"].choices} == {"w4a16"}


def test_a_quantised_head_is_planned_and_timed(planner: Planner, model: PreTrainedModel) -> None:
    with pytest.raises(ModelError, match="no price of rounding a head to w4a16 is known"):
        CurveLibrary.load().head_of(SMALL, "w4a16")
    head = CurveLibrary.load().head_of(SMALL, "w8a16")
    assert head is not None
    references = scheme_versions(planner, 1.0, SCHEMES)
    versions, missing = with_head(planner, DECODE, SCHEMES, references, head)
    by_name = {version.name: version for version in (*references, *versions)}
    (line,) = missing  # the loss of 8 bits leaves no room for that of the head
    assert line.startswith(f"{FASTEST_IN_SCHEMES} uniform w8a16: ")
    assert line.endswith(", head in w8a16")
    uniform, reference = by_name["uniform w4a16, head in w8a16"], by_name["uniform w4a16"]
    assert uniform.loss == reference.loss + head.loss
    assert by_name[f"{FASTEST_IN_SCHEMES} uniform w4a16, head in w8a16"].loss <= reference.loss
    assert {version.head for version in versions} == {head}
    *_, plain, quantised = bench_of(planner, model).run([reference, replace(reference, head=head)], DECODE)
    less = 4 * head.params - head.bytes  # of float32
    assert plain.timed.memory_bytes - quantised.timed.memory_bytes == less
    assert plain.planned_bytes - quantised.planned_bytes == head.dense_bytes - head.bytes
    assert plain.predicted_ns is not None
    assert quantised.predicted_ns == plain.predicted_ns - less
    assert isinstance(model.get_output_embeddings(), nn.Linear)


@pytest.mark.parametrize("part", PARTS)
def test_a_model_without_gemms_or_half_of_a_component_runs(part: str, planner: Planner, model: PreTrainedModel) -> None:
    choices = without(planner.problem.sites, part)
    rest = without_gemms(model, choices)
    blocks = [name for name, module in rest.named_modules() if isinstance(module, SkippedBlock)]
    assert [name for name, share in shares(choices).items() if share < 1] == [part]
    assert blocks == {"attentions": ["model.layers.1.self_attn"], "MLPs": ["model.layers.1.mlp"]}.get(part, [])
    assert step_of(rest, PREFILL)().isfinite().all()
    if part == "neurons":
        assert (weight_bytes(model) - weight_bytes(rest)) // 4 == planner.problem.params
    fused = variant(model, choices, fuse_sites(planner.problem.sites))
    assert all(step_of(fused, workload)().isfinite().all() for workload in (PREFILL, DECODE))
    saved = sum(choice.weight.params - choice.params for choice in choices)
    assert weight_bytes(model) - weight_bytes(fused) > 4 * saved - 4096


def test_versions_keep_the_budget_and_only_padding_adds_to_it(planner: Planner, versions: dict[str, Version]) -> None:
    limit = 0.7 * planner.problem.params
    assert all(versions[name].params <= limit for name in (UNALIGNED, "uniform", "GAC, parameters"))
    assert versions[UNALIGNED].params < versions["pad 8"].params < versions["pad 64"].params
    assert versions["pad 64"].loss == versions[UNALIGNED].loss
    padded = versions["pad 64"].choices
    assert all(choice.dim % 64 == 0 for choice in padded if choice.form == "low_rank")


def test_the_dense_model_is_predicted_and_two_limits_of_few_layers_have_a_plan() -> None:
    reduced = {"neurons": (0.5, latency.Spread(15.0, 0, 9)), "heads": (0.75, latency.Spread(19.0, 0, 9))}
    full = dict.fromkeys(PARTS, 1.0)
    assert predicted_latency(100.0, 20.0, 1.0, reduced, full) == 100.0
    assert predicted_latency(100.0, 20.0, 0.0, reduced, full | {"neurons": 0.5, "heads": 0.5}) == 13.0
    workloads = [Workload("decode", 1, 1024), Workload("prefill", 1, 1024)]
    plan = planner_of_shapes("llama-3-8b", workloads, "nvidia-h200", layers=2).plan_by_default(0.7)
    assert plan.speed is not None
    assert plan.prediction.loss <= plan.certificate.value * (1 + SLACK)
    assert all(workload.plan_ns is not None for workload in plan.workloads)


def test_a_bench_times_every_version(planner: Planner, versions: Any, model: PreTrainedModel) -> None:
    timed = list(versions.values())[:4]
    results = list(bench_of(planner, model).run(timed, PREFILL))
    assert [result.timed.name for result in results] == [PLAIN, DENSE, FUSED, *(version.name for version in timed)]
    assert all(result.speedup > 1 for result in results[3:])


@pytest.mark.parametrize(("room", "sizes"), [(35, [3, 3, 2]), (5, [1] * 8), (1e9, [6, 2])])
def test_groups_are_as_large_as_there_is_room(room: float, sizes: list[int], versions: dict[str, Version]) -> None:
    assert [len(group) for group in in_groups(list(versions.values())[:8], [10] * 8, room, 6)] == sizes
    assert in_groups([], [], room, 6) == [[]]


NAME = "decode:1@32768"
GPUS, LONG = 4, Workload.parse("decode:1@1024")
TIMED, REST = Timed("dense", NAME, Spread(5e7, 0, 9), 1.0, 10**9), Spread(3e7, 0, 9)


def test_latents_are_predicted_by_the_attention_that_they_change() -> None:
    """GEMMs are scaled as the dense model's; dense attention is part of what is timed without GEMMs."""
    workloads = (Workload.parse(NAME),)
    sites = family_of(SHAPES["llama-3-8b"]).sites(SHAPES["llama-3-8b"])
    timing = Timing(table(model_points("llama-3-8b", workloads, forms=("latent:1",))), workloads)
    plain = [
        WeightChoice(weight, "dense", form_named("dense").full(weight)) for site in sites for weight in site.weights
    ]
    latents = [WeightChoice(each.weight, "latent:1", 64) if each.weight.cached else each for each in plain]
    before, after = (summed_attention(timing, choices, NAME) for choices in (plain, latents))
    assert 0 < after < before
    gemms, fewer = 10**7, 9 * 10**6
    dense = Version("dense", tuple(plain), True, 0.0, {NAME: gemms + before})
    ours = Version("ours", tuple(latents), True, 0.0, {NAME: fewer + after})
    model: Any = SimpleNamespace(dtype=torch.bfloat16)
    timer: Any = None
    bench = Bench(model, sites, timing, (dense,) * 3, timer)

    def result(version: Version) -> Result:
        return bench._result(version, TIMED, {True: TIMED, False: TIMED}, {None: REST}, {})

    assert result(dense).predicted_ns == result(dense).sum_ns == 5e7
    assert result(ours).predicted_ns == pytest.approx(3e7 + 2e7 * fewer / gemms + after - before)
    assert result(ours).sum_ns == 5e7 - (gemms - fewer) + after - before
    saved = dense.bytes - ours.bytes + 2 * 32768 * (dense.kv_numbers - ours.kv_numbers)
    assert (result(dense).planned_bytes, result(ours).planned_bytes) == (10**9, 10**9 - saved)
    for other in ({"gpus": 2}, {"compiled": True}, {"table_ns": {NAME: None}}):
        assert result(replace(ours, **other)).predicted_ns is None


@pytest.fixture(scope="module")
def split_planner() -> Planner:
    name, runs = "llama-3-8b", [LONG]
    points = [point for gpus in (1, GPUS) for point in model_points(name, runs, gpus=gpus)]
    points += [*fused_points(name, runs, gpus=GPUS), *collective_points(GPUS, runs)]
    return planner_of_shapes(name, runs, table(dict.fromkeys(points)), layers=1, gpus=GPUS)


@pytest.mark.slow
def test_versions_for_several_gpus(split_planner: Planner) -> None:
    versions = {version.name: version for version in versions_at(split_planner, 0.7)}
    assert {versions[name].gpus for name in (UNALIGNED, "uniform", DEFAULT + FOR_ONE)} == {1}
    assert versions[DEFAULT].gpus == versions["pad 64"].gpus == split_planner.dense(fused=True).gpus == GPUS
    split, alone = fastest_versions(split_planner, 0.7, LONG, 0.7)
    assert (split.name, split.gpus, alone.name, alone.gpus) == (FASTEST, GPUS, FASTEST + FOR_ONE, 1)
    assert max(split.loss, alone.loss) <= 0.7
