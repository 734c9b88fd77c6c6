"""Whole models timed in turns, with a fake timer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from gac.core.errors import GacError, ProfileError
from gac.core.workloads import Workload
from gac.evaluation import latency
from gac.evaluation.latency import weight_bytes
from gac.models.shapes import Shapes
from gac.profiling.timing.sampling import Batch
from gac_extensions.lab.shapes.models import model_of_shapes

SMALL = Shapes("llama", 256, 768, 2, 8, 4, 32, 512)
PREFILL, DECODE = Workload.parse("prefill:2x8"), Workload.parse("decode:2@8")


def step_of(model: PreTrainedModel, workload: Workload) -> latency.Step:
    ids = latency.prepare(model, workload)
    return (
        latency.decode_step(model, latency.Context(model, ids))
        if workload.phase == "decode"
        else latency.prefill_step(model, ids)
    )


class CountingTimer:
    """Runs each step once, and reports a time of 1 us per parameter."""

    def hold(self, model: PreTrainedModel, workload: Workload, compiled: bool) -> tuple[float, int]:
        assert step_of(model, workload)().isfinite().all()
        return float(weight_bytes(model)), weight_bytes(model)

    def round(self, prepared: Sequence[float]) -> Batch:
        return Batch(list(prepared), 1980)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of_shapes(SMALL, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("workload", [PREFILL, DECODE])
def test_a_step_gives_what_the_model_gives(model: PreTrainedModel, workload: Workload) -> None:
    step = step_of(model, workload)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (2, 8), generator=generator)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(input_ids=ids).logits[:, -1:]
    model.set_attn_implementation("sdpa_whole")
    first = step()
    assert torch.allclose(first, expected, atol=1e-4)
    assert all(torch.equal(step(), first) for _ in range(3))


def test_a_long_context_repeats_a_short_one(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = latency.prepare(model, Workload.parse("decode:2@12"))
    full = latency.Context(model, ids)
    monkeypatch.setattr(latency, "READ", 4)
    context = latency.Context(model, ids)
    layers: list[Any] = [each.cache.layers[1] for each in (full, context)]
    for states in (layers[1].keys, layers[1].values):
        assert torch.equal(states[:, :, 4:8], states[:, :, :4])
        assert torch.equal(states[:, :, 8:], states[:, :, :4])
    # A CPU may add up the products of 4 rows in another order than those of 12.
    assert torch.allclose(layers[0].keys[:, :, :4], layers[1].keys[:, :, :4], rtol=1e-4, atol=1e-4)
    step = latency.decode_step(model, context)
    assert torch.equal(step(), step())
    assert context.nbytes == full.nbytes


def test_what_cannot_be_timed_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(GacError, match="of 200,000 tokens for a model of 131,072 positions"):
        step_of(model, Workload.parse("decode:1@200000"))
    timer: Any = CountingTimer()
    with pytest.raises(GacError, match="11 models at once; expected at most 10"):
        latency.time_in_turns([latency.Entry("model", lambda: model)] * 11, PREFILL, timer)


def test_noise_takes_more_rounds_and_late_rounds_are_repeated() -> None:
    generator = np.random.default_rng(0)
    samples = latency.interleaved(lambda order: Batch(list(generator.uniform(50, 150, len(order))), 1980), 2)
    assert len(samples) == latency.MAX_ROUNDS
    late = iter([False, *[True, False] * latency.MAX_ROUNDS])
    samples = latency.interleaved(lambda order: Batch([200.0 if (slow := next(late)) else 100.0], 1980, slow), 1)
    assert (samples == 100.0).all()
    orders: list[list[int]] = []

    def run_round(order: Sequence[int]) -> Batch:
        orders.append(list(order))
        return Batch([100.0 + version for version in order], 1980)

    samples = latency.interleaved(run_round, 3)
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert len({*map(tuple, orders)}) > 3
    assert (samples == [100.0, 101.0, 102.0]).all()
    assert len(samples) == latency.MIN_ROUNDS


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_timing_needs_a_gpu() -> None:
    with pytest.raises(ProfileError, match="no CUDA device"):
        latency.GraphTimer()
