"""Plans for a model that will be healed: losses as healing leaves them, and what a user gets wrong."""

import copy
from typing import Any

import pytest
import torch
from trained import LENGTH, Trained

import gac
from gac import api
from gac.allocation.problem import Problem
from gac.errors import GacError, TextError
from gac.healing import prices
from gac.healing.prices import Left, sample
from gac.healing.text import parted
from gac.models.sites import Weight
from gac.plan import WeightChoice
from gac.plan_summary import allocate_command
from gac.sensitivity.calibration import CalibrationRun

PLAIN: dict[str, Any] = {"latency": "any", "fuse": False, "profile": "nvidia-h100-80gb-hbm3", "progress": False}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prices, "SAMPLED", 2)
    monkeypatch.setattr(prices, "STEPS", 8)


def allocate(learned: Trained, windows: int = 16, **options: Any) -> gac.Plan:
    how = {"calibration": f"{learned.text}:{windows}x{LENGTH}", "tokenizer": learned.tokenizer}
    return gac.allocate(learned.model, **(PLAIN | how | options))


def choice(layer: int, place: str, form: str = "low_rank", scheme: str = "bf16") -> WeightChoice:
    return WeightChoice(Weight(f"model.layers.{layer}.mlp.{place}", 64, 64), form, 8, scheme)


@pytest.mark.parametrize(
    "asked",
    [{"budget": 0.3}, {"memory": 0.12, "schemes": ("w2a16:32",), "rotate": True}],
    ids=["forms", "schemes, rotated"],
)
def test_losses_are_what_healing_leaves_and_the_model_is_as_it_was(
    asked: dict[str, Any], learned: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    model, state = learned.model, copy.deepcopy(learned.model.state_dict())
    asks = {name: one.requires_grad for name, one in model.named_parameters()}
    plain = allocate(learned, **asked)
    with caplog.at_level("INFO", logger="gac"):
        healed = allocate(learned, healed=True, **asked)
    assert "healing leaves 0." in caplog.text
    assert prices.LEAST_LEFT * plain.prediction.loss < healed.prediction.loss < plain.prediction.loss
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    assert {name: one.requires_grad for name, one in model.named_parameters()} == asks
    assert not plain.compare(healed).same_prediction
    assert "losses as healing leaves them" in healed.summary()
    assert ("--healed" in allocate_command(plain), "--healed" in allocate_command(healed)) == (False, True)


def test_a_frontier_counts_them_the_same_every_time(learned: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []

    def twice(problem: Problem, run: CalibrationRun) -> Problem:
        for _ in range(2):
            found = prices.prices_after_healing(problem, run)
            parts.append({key: float(curve.loss[0]) for key, curve in found.curves.by_key.items()})
        return found

    monkeypatch.setattr(api, "prices_after_healing", twice)
    how = {"calibration": f"{learned.text}:16x{LENGTH}", "tokenizer": learned.tokenizer, "progress": False}
    healed = gac.frontier(learned.model, healed=True, points=2, profile=PLAIN["profile"], **how)
    assert healed.recipe.measure.healed
    assert parts[0] == parts[1]


def test_every_kind_is_sampled_in_even_steps() -> None:
    ups = [(choice(layer, "up_proj"),) for layer in range(10)]
    downs = [(choice(layer, "down_proj"),) for layer in range(2)]
    taken = sample([*ups, *downs], 6)
    assert [one.weight.name.split(".")[2] for (one,) in taken] == ["1", "5", "8", "0", "1"]
    assert sample([*ups, *downs], 1) == [ups[5], downs[1]]
    assert sample([], 6) == []


def test_a_part_is_that_of_what_is_most_like_it() -> None:
    left = Left({("low_rank", "bf16", "up_proj"): [0.5], ("low_rank", "bf16", "q_proj"): [0.2, 0.8]})
    assert left.part("low_rank", "bf16", "model.layers.0.mlp.up_proj") == 0.5
    assert left.part("low_rank", "bf16", "model.layers.0.self_attn.q_proj") == pytest.approx(0.4)
    assert left.part("low_rank", "bf16", "model.layers.0.self_attn.o_proj") == pytest.approx(0.08 ** (1 / 3))
    assert left.part("narrow", "w4a16", "model.layers.0.mlp.down_proj") == left.mean == pytest.approx(0.08 ** (1 / 3))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rule": "uniform"}, "rule='uniform'; expected loss with healed=True"),
        ({"healed": "yes"}, "measure.healed='yes'; expected True or False"),
    ],
)
def test_what_cannot_be_had_is_refused(options: dict[str, Any], said: str, learned: Trained) -> None:
    with pytest.raises(GacError, match=said):
        allocate(learned, **({"budget": 0.4, "healed": True} | options))


def test_too_little_text_is_refused() -> None:
    said = "the calibration text has 6 windows of 64 tokens to heal on; expected at least 10"
    with pytest.raises(TextError, match=said):
        parted("the calibration text", torch.zeros(6, 64, dtype=torch.int64))
