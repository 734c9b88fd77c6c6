"""Models in memory that cannot be compressed and saved are refused before anything is measured, and by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers import LlamaForCausalLM

import gac
from gac.core.errors import ModelError
from gac.models.loading import load_model
from gac.models.plain import check_plain
from gac.testing import models

Q_PROJ = "model.layers.0.self_attn.q_proj"
UP_PROJ = "model.layers.1.mlp.up_proj"


def check(model: Any) -> None:
    check_plain(model, [Q_PROJ, UP_PROJ])


def refusal(model: Any) -> str:
    with pytest.raises(ModelError) as caught:
        check(model)
    return str(caught.value)


def test_a_fresh_model_passes_and_its_random_state_stays(tiny_model: LlamaForCausalLM) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    check(tiny_model)
    assert torch.equal(torch.rand(1), expected)


def test_an_adapter_has_to_be_merged_first(tiny_model: LlamaForCausalLM) -> None:
    peft = pytest.importorskip("peft", exc_type=ImportError)
    for options in (
        {"target_modules": ["q_proj"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["embed_tokens"]},
    ):
        model = models.tiny_model()
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **options))
        message = refusal(adapted.base_model.model)
        assert "lora_" in message
        assert message.endswith("Merge the adapter into the weights first (merge_and_unload of peft).")
        adapted.merge_adapter()
        assert "merge_and_unload" in refusal(adapted.base_model.model)
        check(adapted.merge_and_unload())
    scaled = peft.get_peft_model(
        tiny_model, peft.IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"])
    )
    assert "merge_and_unload" in refusal(scaled.base_model.model)


def test_an_adapter_is_refused_by_allocate(tiny_model: LlamaForCausalLM, tiny_tokenizer: Any) -> None:
    peft = pytest.importorskip("peft", exc_type=ImportError)
    adapted = peft.get_peft_model(tiny_model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    for call in (gac.allocate, gac.frontier):
        with pytest.raises(ModelError, match="merge_and_unload"):
            call(adapted.base_model.model, tokenizer=tiny_tokenizer, calibration=models.tiny_text(), progress=False)


class Doubled(nn.Linear):
    """A Linear of the same parameters and another function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def normed(model: Any) -> None:
    parametrizations.weight_norm(model.get_submodule(Q_PROJ))


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.get_submodule(Q_PROJ), "weight", 0.5)


def doubled(model: Any) -> None:
    model.set_submodule(UP_PROJ, Doubled(64, 176, bias=False))


def hooked(model: Any) -> None:
    model.get_submodule(Q_PROJ).register_forward_hook(lambda _module, _inputs, output: 2 * output)


def with_own_forward(model: Any) -> None:
    model.get_submodule(Q_PROJ).forward = lambda x: x


def narrower(model: Any) -> None:
    model.set_submodule(UP_PROJ, nn.Linear(64, 100, bias=False))


def with_value_head(model: Any) -> None:
    model.v_head = nn.Linear(64, 1)


def in_float8(model: Any) -> None:
    weight = model.get_parameter(f"{UP_PROJ}.weight").detach().to(torch.float8_e4m3fn)
    model.get_submodule(UP_PROJ).weight = nn.Parameter(weight, requires_grad=False)


def in_int8(model: Any) -> None:
    weight = torch.zeros(176, 64, dtype=torch.int8)
    model.get_submodule(UP_PROJ).weight = nn.Parameter(weight, requires_grad=False)


def with_scale(model: Any) -> None:
    model.get_submodule(UP_PROJ).weight_scale = nn.Parameter(torch.ones(1))


def nan_frequency(model: Any) -> None:
    model.model.rotary_emb.inv_freq[2] = torch.nan


def greedy_with_temperature(model: Any) -> None:
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.5


def with_object(model: Any) -> None:
    model.config.note = object()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (normed, f"{Q_PROJ}.parametrizations.weight.original0 and 1 other parameters beside"),
        (pruned, f"{Q_PROJ}.weight_orig beside the weights of its architecture"),
        (doubled, f"{UP_PROJ} is a Doubled; expected a plain linear weight"),
        (hooked, f"{Q_PROJ} has a forward hook"),
        (with_own_forward, f"{Q_PROJ} has a forward hook, or a forward of its own"),
        (narrower, f"{UP_PROJ}.weight has shape (100, 64); expected (176, 64), as its config says"),
        (with_value_head, "with v_head.bias and 1 other parameters beside the weights of its architecture"),
        (
            in_float8,
            f"{UP_PROJ} has weights in torch.float8_e4m3fn; expected 16 or 32 bits a number. Use the checkpoint",
        ),
        (in_int8, f"{UP_PROJ} has weights in torch.int8"),
        (with_scale, "Use the checkpoint that it was made from."),
        (nan_frequency, "model.rotary_emb.inv_freq holds 1 NaN or infinite values of 8"),
        (greedy_with_temperature, "temperature"),
        (with_object, "an invalid LlamaConfig (Object of type object is not JSON serializable)"),
    ],
)
def test_anything_but_plain_weights_is_refused(
    change: Callable[[Any], None], message: str, tiny_model: LlamaForCausalLM
) -> None:
    change(tiny_model)
    assert message in refusal(tiny_model)


def share_weight(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight = model.model.layers[0].mlp.down_proj.weight


def share_mlp(model: Any) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


def share_layer(model: Any) -> None:
    model.model.layers[1] = model.model.layers[0]


def share_keys_and_values(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight = attention.v_proj.weight


def share_norm(model: Any) -> None:
    model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm


def overlap(model: Any) -> None:
    attention, rows = model.model.layers[0].self_attn, torch.randn(64, 64)
    attention.k_proj.weight, attention.v_proj.weight = nn.Parameter(rows[:32]), nn.Parameter(rows[16:48])


@pytest.mark.parametrize(
    ("share", "names"),
    [
        (share_weight, ("0.mlp.down_proj", "1.mlp.down_proj")),
        (share_mlp, ("0.mlp.", "1.mlp.")),
        (share_layer, ("layers.0.", "layers.1.")),
        (share_keys_and_values, ("0.self_attn.k_proj", "0.self_attn.v_proj")),
        (share_norm, ("0.input_layernorm", "1.input_layernorm")),
        (overlap, ("0.self_attn.k_proj", "0.self_attn.v_proj")),
    ],
)
def test_weights_that_share_memory_are_named(
    share: Callable[[Any], None], names: tuple[str, str], tiny_model: LlamaForCausalLM
) -> None:
    share(tiny_model)
    message = refusal(tiny_model)
    assert "share their memory" in message
    assert all(name in message for name in names)


def test_parts_of_one_tensor_that_do_not_overlap_pass(tiny_model: LlamaForCausalLM) -> None:
    attention, rows = tiny_model.model.layers[0].self_attn, torch.randn(64, 64)
    attention.k_proj.weight, attention.v_proj.weight = nn.Parameter(rows[:32]), nn.Parameter(rows[32:])
    check(tiny_model)


def test_a_head_that_is_tied_by_hand_is_saved_and_loaded(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: Any, tmp_path: Any
) -> None:
    tiny_model.lm_head.weight = tiny_model.model.embed_tokens.weight
    given = {"tokenizer": tiny_tokenizer, "calibration": models.tiny_text(), "progress": False}
    plan = gac.allocate(tiny_model, 0.8, latency="any", **given)
    small = gac.compress(tiny_model, plan, **given)
    gac.save(small, tmp_path / "saved", tokenizer=tiny_tokenizer)
    loaded: Any = gac.load(tmp_path / "saved", device="cpu")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, small(ids).logits)


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = models.tiny_model()
    with pytest.raises(ModelError, match=r"^model.embed_tokens.weight was made in torch.inference_mode"):
        load_model(model)


def test_a_call_in_inference_mode_gives_the_same_plan(tiny_model: LlamaForCausalLM, tiny_tokenizer: Any) -> None:
    given = {"tokenizer": tiny_tokenizer, "calibration": models.tiny_text(), "progress": False, "latency": "any"}
    plan = gac.allocate(tiny_model, 0.8, **given)
    with torch.inference_mode():
        assert gac.allocate(tiny_model, 0.8, **given) == plan
        small = gac.compress(tiny_model, plan, tokenizer=tiny_tokenizer, calibration=models.tiny_text(), progress=False)
    assert not any(parameter.is_inference() for parameter in small.parameters())


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens", "model.norm", "model.layers.1.mlp", ""])
def test_hooks_that_no_checkpoint_holds_are_refused(name: str, tiny_model: LlamaForCausalLM) -> None:
    handle = tiny_model.get_submodule(name).register_forward_hook(lambda module, inputs, output: output)
    with pytest.raises(ModelError, match=r"has a forward hook; expected a model without hooks, which"):
        check(tiny_model)
    handle.remove()
    check(tiny_model)


def test_hooks_of_transformers_pass(tiny_model: LlamaForCausalLM) -> None:
    tiny_model.enable_input_require_grads()
    tiny_model(torch.arange(4)[None], output_hidden_states=True, output_attentions=True)
    assert tiny_model.model.embed_tokens._forward_hooks
    check(tiny_model)
