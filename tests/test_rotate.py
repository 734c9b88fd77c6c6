"""Rotation from the allocation to the checkpoint: what is measured and saved is rotated, as the plan says."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import gac
from gac.compression import refit
from gac.core.errors import GacError, ModelError, PlanError
from gac.core.io import home
from gac.models.basis import Rotation
from gac.models.loading import load_model
from gac.plan.summary import allocate_command
from tests.changed import with_measured, with_recipe
from tests.compression.applying import logits
from tests.models.small import small_config, small_model
from tests.small_pipeline import Small, has_state, state_of

HEAD = 258 * 64
FEW: dict[str, Any] = {"schemes": ("w8a16", "w4a16:32"), "forms": (), "memory": 0.4, "latency": "any"}


@pytest.fixture
def tied(small: Small) -> Small:
    """The pipeline on a model whose head is tied, and whose gains and features are not all alike."""
    model = small_model(small_config("llama", tie_word_embeddings=True, num_hidden_layers=1))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.5 * torch.randn(parameter.shape)
    return Small(model, small.tokenizer, small.text)  # type: ignore[arg-type]


@pytest.fixture
def untied(small: Small) -> Small:
    return Small(small_model(small_config("llama", num_hidden_layers=1)), small.tokenizer, small.text)  # type: ignore[arg-type]


def test_the_plan_says_what_was_rotated_and_the_model_is_as_it_was(tied: Small) -> None:
    before = state_of(tied.model)
    plan = tied.allocate(0.7, rotate=True)
    assert has_state(tied.model, before)
    assert tied.model.config.tie_word_embeddings
    assert plan.recipe.space.rotate
    assert plan.measured.rotation == Rotation(True, HEAD)
    assert "rotated      residual stream and values of heads; the head is no longer tied: 16,512 parameters more" in (
        plan.summary()
    )
    assert "--rotate" in allocate_command(plan)
    plain = tied.allocate(0.7)
    assert plain.measured.rotation is None
    assert (plain.measured.digest, plain.measured.params) == (plan.measured.digest, plan.measured.params)
    assert "rotate" not in plain.summary() + allocate_command(plain)
    assert plain.prediction.loss != plan.prediction.loss  # of other statistics


def test_statistics_of_both_bases_are_kept_apart(tied: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "home"))
    tied.allocate(0.8)
    first = tied.allocate(0.8, rotate=True)
    folders = {*(home() / "statistics").iterdir()}
    assert len(folders) == 2
    assert tied.allocate(0.8, rotate=True) == first
    assert {*(home() / "statistics").iterdir()} == folders


@pytest.mark.parametrize("refit", ["none", "residual"])
def test_it_is_compressed_saved_and_loaded_in_the_new_basis(tied: Small, tmp_path: Path, refit: str) -> None:
    embedding = tied.model.model.embed_tokens.weight.clone()
    gram = embedding @ embedding.T
    plan = tied.allocate(0.7, rotate=True, refit=refit)
    small, loaded = tied.there_and_back(plan, tmp_path)
    assert small is tied.model
    counted = sum(parameter.numel() for parameter in loaded.parameters())
    assert counted == plan.measured.params - plan.budget.total + plan.budget.used + HEAD
    assert plan.kept_of_model * plan.measured.params == pytest.approx(counted)
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    assert torch.allclose(loaded.model.embed_tokens.weight @ loaded.model.embed_tokens.weight.T, gram, atol=1e-5)
    assert not torch.equal(loaded.model.embed_tokens.weight, embedding)
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert gac.verify(tmp_path / "small").tensors == len(loaded.state_dict())
    gac.export(tmp_path / "small", tmp_path / "merged", merge=True)
    merged = load_model(tmp_path / "merged").model
    assert (logits(merged) - logits(loaded).to(merged.device)).abs().max() < 1e-4


def test_where_nothing_is_compressed_the_function_is_the_dense_one(tied: Small) -> None:
    dense = logits(tied.model)
    plan = tied.allocate(1.0, rotate=True, refit="none", slack=0)
    assert {one.form for one in plan.weights} == {"dense"}
    assert (logits(tied.compress(plan)) - dense).abs().max() < 1e-5


def test_what_fails_leaves_the_model_as_it_was(tied: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, before = tied.allocate(0.7, rotate=True), state_of(tied.model)
    monkeypatch.setattr(refit, "build_modules", Mock(side_effect=GacError("a failure", "none", "Do it again.")))
    with pytest.raises(GacError, match="a failure"):
        tied.compress(plan)
    assert has_state(tied.model, before)
    assert tied.model.lm_head.weight is tied.model.model.embed_tokens.weight


def test_a_plan_is_for_the_model_as_it_was_loaded(tied: Small) -> None:
    plan = tied.allocate(0.7, rotate=True)
    again = copy.deepcopy(tied.model)
    small = tied.compress(plan)
    assert torch.equal(logits(tied.compress(plan, model=again)), logits(small))
    with pytest.raises(ModelError, match="which is compressed"):
        tied.compress(plan, model=small)


def test_rounding_shots_and_frontiers_are_of_the_rotated_model(tied: Small) -> None:
    rounded = tied.allocate(None, **FEW, rotate=True)
    dense = logits(tied.model)
    small = tied.compress(rounded, model=copy.deepcopy(tied.model))
    assert torch.corrcoef(torch.stack([logits(small).flatten(), dense.flatten()]))[0, 1] > 0.9
    assert tied.allocate(0.7, rotate=True, shots=2).measured.rotation == Rotation(True, HEAD)
    found = tied.frontier(points=3, rotate=True)
    assert found.plan(0).measured.rotation == Rotation(True, HEAD)
    assert found.plan(0).recipe.space.rotate


@pytest.mark.parametrize("options", [{"budget": 0.7, "rotate": True}, {"budget": None, **FEW}])
def test_before_norms_behind_weights_values_alone_are_rotated(small: Small, options: Any, tmp_path: Path) -> None:
    model = small_model(small_config("gemma3_text", num_hidden_layers=1))
    assert model.config.tie_word_embeddings
    plan = small.allocate(model=model, **options)
    assert plan.measured.rotation == Rotation(False, 0)
    assert "rotated      values of heads alone\n" in plan.summary()
    small.there_and_back(plan, tmp_path, model=model)


def test_a_model_with_layer_norm_is_refused_only_where_rotation_is_asked_for(small: Small) -> None:
    model = small_model(small_config("gpt2"))
    with pytest.raises(ModelError, match=r"transformer.ln_f is a LayerNorm, with rotate=True; expected an RMSNorm"):
        small.allocate(0.7, model=model, rotate=True)
    plan = small.allocate(None, model=model, **FEW)
    assert plan.recipe.space.rotate is False
    assert plan.measured.rotation is None


def test_a_plan_that_contradicts_itself_is_refused(small: Small) -> None:
    plan = small.allocate(0.7, rotate=True)
    assert plan.measured.rotation is not None
    for change in (
        lambda: with_measured(plan, rotation=None),
        lambda: with_recipe(plan, rotate=False),
        lambda: with_measured(plan, rotation=replace(plan.measured.rotation, untied=-1)),
    ):
        with pytest.raises(PlanError, match=r"measured\.rotation"):
            change()


MANY: dict[str, Any] = {"forms": ("low_rank",), "memory": 0.6}


@pytest.mark.parametrize(
    ("kind", "options", "rotation", "words"),
    [
        ("untied", {}, Rotation(True, 0), "--rotate"),
        ("tied", {}, None, "--no-rotate"),  # no head is untied by default
        ("untied", {"rotate": False}, None, "--no-rotate"),
        ("untied", MANY | {"schemes": ("bf16",)}, None, ""),
        ("untied", MANY | {"schemes": ("bf16", "w8a16", "fp8")}, None, ""),
    ],
)
def test_few_bits_are_in_another_basis(kind: str, options: Any, rotation: Any, words: str, request: Any) -> None:
    pipeline = request.getfixturevalue(kind)
    plan = pipeline.allocate(None, **FEW | options)
    assert plan.recipe.space.rotate is (rotation is not None)
    assert plan.measured.rotation == rotation
    assert ("rotated      residual stream and values of heads\n" in plan.summary()) is (rotation is not None)
    command = allocate_command(plan)
    assert words in command if words else "rotate" not in command
    assert pipeline.allocate(None, **FEW | options | {"rotate": rotation is not None}) == plan
    assert gac.allocate(pipeline.model, recipe=plan.recipe, tokenizer=pipeline.tokenizer, progress=False) == plan


def test_a_frontier_of_few_bits_is_of_the_rotated_model(untied: Small, tied: Small) -> None:
    asked: dict[str, Any] = {"points": 3, "limit": "bytes", "schemes": ("w8a16", "w4a16:32")}
    assert untied.frontier(**asked).plan(0).measured.rotation == Rotation(True, 0)
    assert tied.frontier(**asked).plan(0).measured.rotation is None


def test_weights_that_were_in_few_bits_are_said_to_be_where_they_are_rounded_again(untied: Small, caplog: Any) -> None:
    untied.model.config.name_or_path = "smollm2"
    said = "the dense weights were in few bits before"
    plan = untied.allocate(None, **FEW, rotate=False)
    assert plan.measured.on_grid
    assert f"grid         {said}" in plan.summary()
    assert said in caplog.text
    caplog.clear()
    for budget, options in ((None, {**FEW, "rotate": True}), (0.7, {})):
        plan = untied.allocate(budget, **options)
        assert not plan.measured.on_grid
        assert said not in plan.summary() + caplog.text
