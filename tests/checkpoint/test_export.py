"""Compressed models as models of their stock architecture, opened by transformers alone."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

import gac
from gac.core.errors import CheckpointError
from tests.compression.applying import logits
from tests.compression.compressed import WIDTH, MakePlan, changes_of, compressed, small_compressed
from tests.models.small import every_layout, small_config, small_model, weights_of


def opened(place: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(place)


def narrower(model_type: str, make_plan: MakePlan) -> Any:
    """A model whose MLPs alone are narrower, by as much in both layers."""
    config = small_config(model_type)
    changes = {weight.name: ("narrow", WIDTH) for weight in weights_of(config) if weight.neurons}
    return compressed(small_model(config), make_plan, changes)


@every_layout
@pytest.mark.parametrize(("make", "near"), [(small_compressed, 1e-4), (narrower, 1e-5)], ids=["merged", "plain"])
def test_the_same_function(model_type: str, make: Any, near: float, make_plan: MakePlan, tmp_path: Path) -> None:
    """Models whose MLPs are alike need no merging."""
    model, dense = make(model_type, make_plan), small_model(small_config(model_type))
    gac.export(model, tmp_path / "exported", merge=make is small_compressed)
    exported = opened(tmp_path / "exported")
    assert type(exported) is type(dense)
    assert exported.num_parameters() == (dense if make is small_compressed else model).num_parameters()
    assert (logits(exported) - logits(model)).abs().max() < near * logits(model).abs().max()


@pytest.mark.parametrize("form", ["latent:1", "fused"])
def test_pairs_of_other_kinds_and_fused_inputs_are_merged(form: str, make_plan: MakePlan, tmp_path: Path) -> None:
    config = small_config("llama")
    pairs = {weight.name: ("latent:1", 8) for weight in weights_of(config) if weight.cached}
    changes = changes_of(config) if form == "fused" else pairs
    model = compressed(small_model(config), make_plan, changes, form == "fused")
    gac.export(model, tmp_path / "merged", merge=True)
    assert (logits(opened(tmp_path / "merged")) - logits(model)).abs().max() < 1e-4


def test_the_export_holds_what_any_model_holds(make_plan: MakePlan, tiny_tokenizer: Any, tmp_path: Path) -> None:
    gac.export(narrower("gpt2", make_plan), tmp_path / "plain", tokenizer=tiny_tokenizer)
    names = "README.md config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
    assert {path.name for path in (tmp_path / "plain").iterdir()} == {*names.split()}
    config = (tmp_path / "plain" / "config.json").read_text()
    assert "gac" not in config.lower()
    assert type(opened(tmp_path / "plain")) is GPT2LMHeadModel


NARROW = {f"model.layers.1.mlp.{name}_proj": ("narrow", WIDTH) for name in ("gate", "up", "down")}
SHORT = {f"model.layers.{layer}.self_attn.{name}_proj": ("head_dim", 8) for layer in (0, 1) for name in "vo"}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (changes_of(small_config("llama")), "layers.0.self_attn.q_proj is low_rank with dim 16, LowRankLinear("),
        (NARROW, "MLPs of 96 to 176 neurons; "),
        (SHORT, "layers.0.self_attn.v_proj is head_dim with dim 8, ValueLinear("),
    ],
    ids=["pairs", "mlps of several widths", "shorter values"],
)
def test_what_no_stock_config_can_say_is_refused(changes: Any, found: str, make_plan: MakePlan, tmp_path: Path) -> None:
    model = compressed(small_model(small_config("llama")), make_plan, changes)
    with pytest.raises(CheckpointError, match=f"^(model.)?{re.escape(found)}.*Export it merged .--merge, merge=True."):
        gac.export(model, tmp_path / "plain")
    assert not list(tmp_path.iterdir())


def test_a_merged_model_keeps_its_dtype(make_plan: MakePlan, tmp_path: Path, caplog: Any) -> None:
    small_compressed("llama", make_plan).to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    gac.export(tmp_path / "saved", tmp_path / "merged", merge=True)
    assert {parameter.dtype for parameter in opened(tmp_path / "merged").parameters()} == {torch.bfloat16}
    assert "a merged model has the dense model's dims: it is neither smaller nor faster" in caplog.messages
    assert "neither smaller nor faster" in (tmp_path / "merged" / "README.md").read_text()
