"""Rotation: the same function in another basis, of every architecture that can have one, and refused for the others."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gac.models.basis import Rotation
from gac.models.rotation import orthogonal, rotate, rotated, rotates_freely
from tests.compression.applying import logits
from tests.models.small import TWO_KINDS, every_layout, small_config, small_model, weights_of
from tests.refused import assert_refused
from tests.small_pipeline import has_state, state_of

WITH_LAYER_NORM = {"cohere2": "Cohere2LayerNorm", "gpt2": "LayerNorm", "opt": "LayerNorm"}
WITH_NORMS_BEHIND = ("gemma3_text", "olmo2")
BIASED = {"attention_bias": True, "mlp_bias": True, "attention_out_bias": True, "use_bias": True}


def trained(model_type: str, **changed: Any) -> Any:
    """A small model whose gains differ from feature to feature, as those of trained models do."""
    model = small_model(small_config(model_type, **changed))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.5 * torch.randn(parameter.shape)
    return model


def changed_names(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, values in model.state_dict().items() if not torch.equal(values, before[name])}


@every_layout
@pytest.mark.parametrize("tied", [False, True])
def test_the_function_stays_the_same_or_the_model_is_refused(model_type: str, tied: bool) -> None:
    model = trained(model_type, tie_word_embeddings=tied)
    dense, before = logits(model), state_of(model)
    if model_type in WITH_LAYER_NORM:
        assert not rotates_freely(model)
        assert_refused(lambda: rotate(model), "", f" is a {WITH_LAYER_NORM[model_type]}, with rotate=True")
        assert has_state(model, before)
        return
    if model_type in TWO_KINDS:
        assert not rotates_freely(model)
        assert_refused(lambda: rotate(model), f"a {type(model).__name__}, whose attention has a gate", "rotated")
        assert has_state(model, before)
        return
    stream = model_type not in WITH_NORMS_BEHIND
    untied = model.config.vocab_size * model.config.hidden_size if stream and tied else 0
    assert rotates_freely(model) == (not untied)
    assert has_state(model, before)
    assert rotate(model) == Rotation(stream, untied)
    assert (logits(model) - dense).abs().max() < 1e-5
    weights = {f"{weight.name}.weight" for weight in weights_of(model.config)}
    assert changed_names(model, before) >= (weights if stream else {name for name in weights if "o_proj" in name})


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "apertus", "gemma"])
def test_biases_on_all_sides_are_rotated_too(model_type: str) -> None:
    model = trained(model_type, **BIASED)
    dense, before = logits(model), state_of(model)
    biases = {name for name in before if name.endswith(("o_proj.bias", "down_proj.bias"))}
    rotate(model)
    assert (logits(model) - dense).abs().max() < 1e-5
    assert biases <= changed_names(model, before)
    assert bool(biases) == (model_type != "qwen2")


def test_gains_become_one() -> None:
    for model, gain in ((trained("llama"), 1.0), (trained("gemma"), 0.0)):
        rotate(model)
        norms = [values for name, values in model.state_dict().items() if "norm" in name]
        assert len(norms) == 5
        assert all((values == gain).all() for values in norms)


def test_outliers_are_spread_over_all_features() -> None:
    model = trained("llama", hidden_size=256)
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.data[:, 7] *= 40
    name = "model.layers.0.mlp.gate_proj"
    before = model.get_submodule(name).weight.abs().amax(0)
    rotate(model)
    after = model.get_submodule(name).weight.abs().amax(0)
    assert before.max() / before.median() > 20
    assert after.max() / after.median() < 3


def test_each_head_has_its_values_in_its_own_basis() -> None:
    """R2 alone: rows of v_proj within a head are mixed, and no other rows are."""
    model = trained("gemma3_text")
    before = state_of(model)
    rotate(model)
    changed = {name.split(".", 3)[3] for name in changed_names(model, before)}
    assert changed == {"self_attn.v_proj.weight", "self_attn.o_proj.weight"}
    name, size = "model.layers.0.self_attn.v_proj.weight", model.config.head_dim
    for head in range(2):
        rows = slice(head * size, (head + 1) * size)
        old, new = before[name][rows], model.state_dict()[name][rows]
        assert torch.allclose(old.T @ old, new.T @ new, atol=1e-6)


def test_what_is_undone_has_the_same_bits_and_is_tied_again() -> None:
    model = trained("llama", tie_word_embeddings=True)
    dense, before = logits(model), state_of(model)
    with rotated(model) as rotation:
        assert rotation == Rotation(True, 258 * 64)
        assert model.lm_head.weight is not model.model.embed_tokens.weight
        assert not model.config.tie_word_embeddings
        assert not model.all_tied_weights_keys
    assert has_state(model, before)
    assert torch.equal(logits(model), dense)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings
    assert model.all_tied_weights_keys


@pytest.mark.parametrize("keep", [False, True])
def test_a_failure_undoes_it_in_any_case(keep: bool) -> None:
    model = trained("llama", tie_word_embeddings=True)
    before = state_of(model)
    with pytest.raises(KeyError), rotated(model, keep):
        raise KeyError
    assert has_state(model, before)
    with rotated(model, keep):
        pass
    assert bool(changed_names(model, before)) == keep


def test_one_seed_gives_one_rotation() -> None:
    models = [trained("llama") for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        rotate(model, seed)
    assert has_state(models[0], models[1].state_dict())
    assert len(changed_names(models[0], state_of(models[2]))) == 16  # all but five norms


def test_bfloat16_stays_bfloat16() -> None:
    model = trained("llama").to(torch.bfloat16)
    dense = logits(model).float()
    rotate(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert (logits(model).float() - dense).abs().max() < 0.05 * dense.abs().max()


@pytest.mark.parametrize("size", [1, 3, 96])
def test_the_matrix_is_orthogonal_and_as_flat_as_it_can_be(size: int) -> None:
    matrix = orthogonal(size, torch.Generator().manual_seed(0))
    assert matrix.dtype == torch.float64
    assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    power = size & -size
    assert torch.allclose(matrix.square().reshape(size, power, -1).sum(2), torch.full((), 1 / power).double())


class Lora(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("model.layers.1.mlp.up_proj", Lora(64, 176, bias=False), "expected plain"),
        ("lm_head", Lora(64, 258, bias=False), "expected a plain embedding and a linear"),
    ],
)
def test_what_is_not_plain_is_refused(name: str, module: nn.Module, message: str) -> None:
    model = trained("llama", tie_word_embeddings=False)
    model.set_submodule(name, module)
    before = state_of(model)
    assert_refused(lambda: rotate(model), f"{name} is a Lora, with rotate=True; {message}")
    assert not rotates_freely(model)
    assert has_state(model, before)
    model.lm_head.to("meta")
    assert_refused(lambda: rotate(model), "lm_head.weight is offloaded by its device_map, with rotate=True")


def test_a_model_without_a_last_norm_is_refused() -> None:
    model = small_model(small_config("opt", _remove_final_layer_norm=True))
    assert_refused(lambda: rotate(model), "model.decoder.final_layer_norm is a NoneType, with rotate=True")
    assert not rotates_freely(model)


def test_it_says_that_a_head_is_untied(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gac"):
        rotate(trained("llama", tie_word_embeddings=True))
        rotate(trained("olmo2"))
    assert [record.getMessage() for record in caplog.records] == [
        "rotated: residual stream and values of heads; the head is no longer tied: 16,512 parameters more",
        "rotated: values of heads alone",
    ]
