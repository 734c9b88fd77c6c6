"""Whole models timed in turns, beside what is predicted, with a clock of the tests' own."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from gac.allocation.decide import SLACK
from gac.core.errors import GacError, ModelError, ProfileError
from gac.core.workloads import Workload
from gac.evaluation import steps
from gac.evaluation.bench import Bench, Reference, in_groups
from gac.evaluation.latency import LEAST_ROUNDS, MOST_ROUNDS, Entry, GraphTimer, Spread, interleaved, time_in_turns
from gac.evaluation.parts import PARTS, shares, without
from gac.evaluation.shapes import model_of_shapes, planner_of_shapes, variant, weight_bytes, without_gemms
from gac.evaluation.steps import Context, Contexts, Step, decode_step, prefill_step, prepare
from gac.evaluation.versions import (
    DEFAULT,
    DENSE,
    FASTEST_IN_SCHEMES,
    FUSED,
    PLAIN,
    UNALIGNED,
    Planner,
    Version,
    fastest_in_schemes,
    scheme_versions,
    versions_at,
    with_head,
)
from gac.forms.planned_sites import run_together
from gac.measurement.curve_library import CurveLibrary
from gac.models.shapes import shapes_of
from gac.plan.plan import WeightChoice
from gac.profiling.operators import OPERATORS
from gac.profiling.records import Measurement, Point
from gac.profiling.sweeps.coverage import fused_points, model_points
from gac.profiling.timing.sampling import Batch
from gac.runtime.plain.modeling_gac import SkippedBlock
from gac.runtime.storage.modules import stored_modules
from tests.headers import make_profile

SCHEMES = ("w8a16", "w4a16")
PREFILL, DECODE = Workload.parse("prefill:2x8"), Workload.parse("decode:2@8")


def step_of(model: PreTrainedModel, workload: Workload) -> Step:
    ids = prepare(model, workload)
    return decode_step(model, Context(model, ids)) if workload.phase == "decode" else prefill_step(model, ids)


class CountingTimer:
    """Runs each step once for real, and takes 1 us for every parameter that a model has."""

    def hold(self, model: PreTrainedModel, workload: Workload, compiled: bool) -> tuple[float, int]:
        assert step_of(model, workload)().isfinite().all()
        return float(weight_bytes(model)), weight_bytes(model)

    def round(self, held: Sequence[float]) -> Batch:
        return Batch(list(held), 1980)


@pytest.fixture(scope="module")
def planner() -> Planner:
    workloads = [Workload.parse("prefill:1x1024")]
    return planner_of_shapes("smollm2", workloads, "nvidia-h100-80gb-hbm3", layers=2, schemes=SCHEMES)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of_shapes("smollm2", device="cpu", dtype=torch.float32, layers=2)


@pytest.mark.parametrize("workload", [PREFILL, DECODE])
def test_a_step_gives_what_the_model_gives(model: PreTrainedModel, workload: Workload) -> None:
    step = step_of(model, workload)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (2, 8), generator=generator)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(input_ids=ids).logits[:, -1:]
    model.set_attn_implementation("sdpa_whole")
    assert torch.allclose(step(), expected, atol=1e-4)


def test_a_decode_step_can_be_repeated(model: PreTrainedModel) -> None:
    step = step_of(model, DECODE)
    first = step()
    assert all(torch.equal(step(), first) for _ in range(10))


def test_a_long_context_repeats_what_a_short_one_holds(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prepare(model, Workload.parse("decode:2@12"))
    whole = Context(model, ids)
    monkeypatch.setattr(steps, "READ", 4)
    context = Context(model, ids)
    layers: list[Any] = [found.cache.layers[1] for found in (whole, context)]
    for first, again in ((layer.keys, layer.values) for layer in layers[1:]):
        for states in (first, again):
            assert torch.equal(states[:, :, 4:8], states[:, :, :4])
            assert torch.equal(states[:, :, 8:], states[:, :, :4])
    # A CPU may add up the products of 4 rows in another order than those of 12.
    assert torch.allclose(layers[0].keys[:, :, :4], layers[1].keys[:, :, :4], rtol=1e-4, atol=1e-4)
    step = decode_step(model, context)
    assert torch.equal(step(), step())
    assert context.nbytes == whole.nbytes


def test_models_without_some_attention_have_a_context_of_their_own(planner: Planner, model: PreTrainedModel) -> None:
    contexts = Contexts()
    skipping = variant(model, without(planner.problem.sites, "attentions"))
    kept = [contexts.of(one, DECODE, prepare(model, DECODE)) for one in (model, skipping, model)]
    assert kept[0] is kept[2] is not kept[1]
    assert 2 * kept[1].nbytes == kept[0].nbytes


def test_models_share_a_context_unless_their_values_are_shorter(model: PreTrainedModel) -> None:
    ids, contexts = prepare(model, DECODE), Contexts()
    sites = planner_of_shapes("smollm2", [DECODE], "nvidia-h100-80gb-hbm3", layers=2).problem.sites
    weights = [weight for site in sites if site.layer == 1 for weight in site.weights]
    choices = [WeightChoice(weight, "head_dim", 8) for weight in weights if weight.values]
    shorter = variant(model, choices)
    own, other = contexts.of(model, DECODE, ids), contexts.of(shorter, DECODE, ids)
    assert contexts.of(copy.deepcopy(model), DECODE, ids) is own is not other
    assert own.nbytes - other.nbytes == 4 * 2 * 8 * 3 * (64 - 8)
    assert decode_step(shorter, other)().isfinite().all()


def test_the_fastest_of_few_layers_begins_at_the_plan_that_loses_least() -> None:
    """Under two latencies, parameters and the loss no other choice is easily found."""
    workloads = [Workload("decode", 1, 1024), Workload("prefill", 1, 1024)]
    planner = planner_of_shapes("llama-3-8b", workloads, "nvidia-h200", layers=2)
    plan = planner.plan_by_default(0.7)
    assert plan.speed is not None
    assert plan.prediction.loss <= plan.certificate.value * (1 + SLACK)
    assert all(one.plan_ns is not None for one in plan.workloads)


def test_a_workload_beyond_the_models_positions_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(GacError, match="of 200,000 tokens for a model of 131,072 positions"):
        step_of(model, Workload.parse("decode:1@200000"))


@pytest.fixture(scope="module")
def versions(planner: Planner) -> dict[str, Version]:
    return {one.name: one for one in versions_at(planner, 0.7)}


def test_a_variant_has_the_dims_of_its_plan_and_shares_what_does_not_change(
    planner: Planner, versions: dict[str, Version], model: PreTrainedModel
) -> None:
    found = variant(model, versions[UNALIGNED].choices)
    assert (weight_bytes(model) - weight_bytes(found)) // 4 == planner.problem.params - versions[UNALIGNED].params
    assert found.get_input_embeddings().weight is model.get_input_embeddings().weight


def test_a_variant_in_a_scheme_takes_the_bytes_of_its_plan(planner: Planner, model: PreTrainedModel) -> None:
    uniform = planner.uniform("w4a16")
    assert (uniform.name, {one.scheme for one in uniform.choices}) == ("uniform w4a16", {"w4a16"})
    found = variant(model, uniform.choices)
    assert len(stored_modules(found)) == len(uniform.choices)
    assert weight_bytes(model) - weight_bytes(found) == 4 * planner.problem.params - uniform.bytes
    assert step_of(found, PREFILL)().isfinite().all()


@pytest.fixture(scope="module")
def racing() -> Planner:
    """Its table has whatever is asked of it, by the bytes that it moves."""
    points = (*model_points("smollm2", [PREFILL, DECODE], schemes=SCHEMES), *fused_points("smollm2", [PREFILL, DECODE]))
    rows = [Measurement.of(one, 1000.0 + bytes_of(one), 0.0, 10, 1980, True) for one in dict.fromkeys(points)]
    return planner_of_shapes("smollm2", [DECODE], make_profile(rows), layers=2, schemes=SCHEMES)


def test_in_schemes_the_fastest_lose_no_more_than_the_rows_beside_them(racing: Planner) -> None:
    planner, shared = racing, scheme_versions(racing, 0.7, SCHEMES)
    found, missing = fastest_in_schemes(planner, DECODE, SCHEMES, shared)
    by_name = {one.name: one for one in (*shared, *found)}
    bars = ["uniform w8a16", "uniform w4a16", DEFAULT, f"{DEFAULT}, in w8a16", f"{DEFAULT}, in w4a16"]
    assert missing == []
    assert list(by_name) == bars + [f"{FASTEST_IN_SCHEMES} {bar}" for bar in bars]
    for bar in bars:
        fastest = by_name[f"{FASTEST_IN_SCHEMES} {bar}"]
        assert fastest.loss <= by_name[bar].loss
        ns, most = (one.table_ns[str(DECODE)] or 0 for one in (fastest, by_name[bar]))
        assert 0 < ns <= most or not bar.startswith("uniform")  # other plans may have finer dims
    assert {one.scheme for one in by_name[f"{DEFAULT}, in w4a16"].choices} == {"w4a16"}


def test_with_a_rounded_head_they_lose_no_more_either(racing: Planner) -> None:
    head = CurveLibrary.load().head_of(shapes_of("smollm2"), "w8a16")
    assert head is not None
    shared = scheme_versions(racing, 1.0, SCHEMES)
    found, missing = with_head(racing, DECODE, SCHEMES, shared, head)
    by_name = {one.name: one for one in (*shared, *found)}
    (none,) = missing  # what no more than 8 bits lose has no room for the head
    assert none.startswith(f"{FASTEST_IN_SCHEMES} uniform w8a16: ")
    assert none.endswith(", head in w8a16")
    uniform, bar = by_name["uniform w4a16, head in w8a16"], by_name["uniform w4a16"]
    assert uniform.loss == bar.loss + head.loss
    assert by_name[f"{FASTEST_IN_SCHEMES} uniform w4a16, head in w8a16"].loss <= bar.loss
    assert {one.head for one in found} == {head}


def test_a_head_is_rounded_in_the_versions_that_ask_for_it(racing: Planner, model: PreTrainedModel) -> None:
    timer: Any = CountingTimer()
    bench = Bench(model, racing.problem.sites, racing.problem.timing, racing.dense_versions(), timer)
    head = CurveLibrary.load().head_of(shapes_of("smollm2"), "w8a16")
    assert head is not None
    plain = racing.uniform("w4a16")
    *_, without, rounded = bench.run([plain, replace(plain, head=head)], DECODE)
    less = 4 * head.params - head.bytes  # of float32
    assert without.timed.memory_bytes - rounded.timed.memory_bytes == less
    assert without.planned_bytes - rounded.planned_bytes == head.dense_bytes - head.bytes
    assert without.predicted_ns is not None
    assert rounded.predicted_ns == without.predicted_ns - less
    assert isinstance(model.get_output_embeddings(), nn.Linear)


def test_a_head_in_a_scheme_without_a_price_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no price of rounding a head to w4a16 is known; expected one of w8a16\."):
        CurveLibrary.load().head_of(shapes_of("smollm2"), "w4a16")


def bytes_of(point: Point) -> float:
    return OPERATORS.get(point.operation.operator).bytes(point.operation.axes, point.dtype)


def test_a_fused_variant_computes_what_the_model_computes(planner: Planner, model: PreTrainedModel) -> None:
    found = variant(model, planner.dense(fused=True).choices, run_together(planner.problem.sites))
    assert torch.allclose(step_of(found, PREFILL)(), step_of(model, PREFILL)(), atol=1e-4)


def test_a_hollow_model_has_no_targeted_weights(planner: Planner, model: PreTrainedModel) -> None:
    hollow = without_gemms(model, without(planner.problem.sites, "neurons"))
    assert (weight_bytes(model) - weight_bytes(hollow)) // 4 == planner.problem.params


@pytest.mark.parametrize("part", PARTS)
def test_a_hollow_model_without_half_of_a_part_runs(part: str, planner: Planner, model: PreTrainedModel) -> None:
    choices = without(planner.problem.sites, part)
    hollow = without_gemms(model, choices)
    blocks = [name for name, module in hollow.named_modules() if isinstance(module, SkippedBlock)]
    assert [name for name, share in shares(choices).items() if share < 1] == [part]
    assert blocks == {"attentions": ["model.layers.1.self_attn"], "MLPs": ["model.layers.1.mlp"]}.get(part, [])
    assert step_of(hollow, PREFILL)().isfinite().all()


@pytest.mark.parametrize("workload", [PREFILL, DECODE])
@pytest.mark.parametrize("part", PARTS)
def test_a_variant_without_half_of_a_part_runs_fused(
    part: str, workload: Workload, planner: Planner, model: PreTrainedModel
) -> None:
    choices = without(planner.problem.sites, part)
    found = variant(model, choices, run_together(planner.problem.sites))
    assert step_of(found, workload)().isfinite().all()
    assert weight_bytes(model) - weight_bytes(found) > 4 * sum(one.weight.params - one.params for one in choices) - 4096


def test_versions_keep_the_budget_and_only_padding_adds_to_it(planner: Planner, versions: dict[str, Version]) -> None:
    limit = 0.7 * planner.problem.params
    assert all(versions[name].params <= limit for name in (UNALIGNED, "uniform", "GAC, parameters"))
    assert versions[UNALIGNED].params < versions["pad 8"].params < versions["pad 64"].params
    assert versions["pad 64"].loss == versions[UNALIGNED].loss
    assert all(one.dim % 64 == 0 for one in versions["pad 64"].choices if one.form == "low_rank")


def test_every_version_runs_once_a_round_in_an_order_drawn_anew() -> None:
    orders: list[list[int]] = []

    def round_of(order: Sequence[int]) -> Batch:
        orders.append(list(order))
        return Batch([100.0 + at for at in order], 1980)

    samples = interleaved(round_of, 3)
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert len({*map(tuple, orders)}) > 3
    assert (samples == [100.0, 101.0, 102.0]).all()
    assert len(samples) == LEAST_ROUNDS


def test_noise_takes_more_rounds() -> None:
    generator = np.random.default_rng(0)
    samples = interleaved(lambda order: Batch(list(generator.uniform(50, 150, len(order))), 1980), 2)
    assert len(samples) == MOST_ROUNDS


def test_a_round_that_was_queued_late_is_taken_again() -> None:
    late = iter([False, *[True, False] * MOST_ROUNDS])
    samples = interleaved(lambda order: Batch([200.0 if (slow := next(late)) else 100.0], 1980, slow), 1)
    assert (samples == 100.0).all()


def test_the_dense_model_is_predicted_as_it_is_measured() -> None:
    less = {"neurons": (0.5, Spread(15.0, 0, 9)), "heads": (0.75, Spread(19.0, 0, 9))}
    reference = Reference(Spread(100.0, 0, 9), 70, Spread(20.0, 0, 9), less)
    assert reference.predict(70, dict.fromkeys(PARTS, 1.0)) == 100.0
    assert reference.predict(0, dict.fromkeys(PARTS, 1.0) | {"neurons": 0.5, "heads": 0.5}) == 13.0


def test_a_bench_sets_every_version_beside_the_dense_models(
    planner: Planner, versions: dict[str, Version], model: PreTrainedModel
) -> None:
    timer: Any = CountingTimer()
    bench = Bench(model, planner.problem.sites, planner.problem.timing, planner.dense_versions(), timer)
    racing = list(versions.values())[:4]
    results = list(bench.run(racing, PREFILL))
    assert [one.timed.name for one in results] == [PLAIN, DENSE, FUSED, *(one.name for one in racing)]
    assert all(one.speedup > 1 for one in results[3:])


@pytest.mark.parametrize(("room", "sizes"), [(35, [3, 3, 2]), (5, [1] * 8), (1e9, [6, 2])])
def test_groups_are_as_large_as_there_is_room(room: float, sizes: list[int], versions: dict[str, Version]) -> None:
    assert [len(group) for group in in_groups(list(versions.values())[:8], [10] * 8, room, 6)] == sizes
    assert in_groups([], [], room, 6) == [[]]


def test_more_models_than_a_round_takes_are_refused(model: PreTrainedModel) -> None:
    timer: Any = CountingTimer()
    with pytest.raises(GacError, match=r"11 models at once; expected at most 10\. Time them in several runs\."):
        time_in_turns([Entry("model", lambda: model)] * 11, PREFILL, timer)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_timing_needs_a_gpu() -> None:
    with pytest.raises(ProfileError, match="no CUDA device"):
        GraphTimer()
