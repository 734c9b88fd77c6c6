"""Models in memory that cannot be compressed and saved are refused before anything is measured, and by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from transformers import LlamaForCausalLM

from gac.models.loading import load_model
from gac.models.plain import check_plain
from gac.testing import models
from tests.refused import assert_refused
from tests.small_pipeline import Small

Q_PROJ = "model.layers.0.self_attn.q_proj"
UP_PROJ = "model.layers.1.mlp.up_proj"


def check(model: Any) -> None:
    check_plain(model, [Q_PROJ, UP_PROJ])


def test_a_fresh_model_passes_and_its_random_state_stays(tiny_model: LlamaForCausalLM) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    check(tiny_model)
    assert torch.equal(torch.rand(1), expected)


FLOAT8 = torch.zeros(176, 64).to(torch.float8_e4m3fn)
MERGE = "Merge the adapter into the weights first (merge_and_unload of peft)."


@pytest.mark.parametrize("target", ["q_proj", "embed_tokens"])
def test_an_adapter_has_to_be_merged_first(target: str, small: Small) -> None:
    peft = pytest.importorskip("peft", exc_type=ImportError)
    adapted = peft.get_peft_model(small.model, peft.LoraConfig(r=4, target_modules=[target]))
    assert_refused(lambda: check(adapted.base_model.model), "", "lora_", MERGE)
    if target == "q_proj":
        assert_refused(lambda: small.allocate(0.8, adapted.base_model.model), "", MERGE)
        assert_refused(lambda: small.frontier(adapted.base_model.model), "", MERGE)
    adapted.merge_adapter()
    assert_refused(lambda: check(adapted.base_model.model), "", MERGE)
    check(adapted.merge_and_unload())


class Doubled(nn.Linear):
    """A Linear of the same parameters and another function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def replace(name: str, module: nn.Module) -> Callable[[Any], None]:
    return lambda model: model.set_submodule(name, module)


def up_proj(**changed: torch.Tensor) -> Callable[[Any], None]:
    """Parameters of ``UP_PROJ``."""
    parameters = {name: nn.Parameter(values, requires_grad=False) for name, values in changed.items()}
    return lambda model: [setattr(model.get_submodule(UP_PROJ), *item) for item in parameters.items()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: parametrizations.weight_norm(model.get_submodule(Q_PROJ)), "0 and 1 other parameters beside"),
        (replace(UP_PROJ, Doubled(64, 176, bias=False)), f"{UP_PROJ} is a Doubled; expected a plain linear weight"),
        (lambda model: setattr(model.get_submodule(Q_PROJ), "forward", lambda x: x), f"{Q_PROJ} has a forward hook"),
        (replace(UP_PROJ, nn.Linear(64, 100, bias=False)), f"{UP_PROJ}.weight has shape (100, 64); expected (176, 64)"),
        (up_proj(weight=FLOAT8), f"{UP_PROJ} has weights in torch.float8_e4m3fn; expected 16 or 32 bits"),
        (up_proj(weight_scale=torch.ones(1)), "Use the checkpoint that it was made from."),
        (lambda model: model.model.rotary_emb.inv_freq[2].fill_(torch.nan), "inv_freq holds 1 NaN or infinite values"),
        (lambda model: model.generation_config.update(do_sample=False, temperature=0.5), "temperature"),
        (lambda model: setattr(model.config, "note", object()), "an invalid LlamaConfig (Object of type object is"),
    ],
)
def test_anything_but_plain_weights_is_refused(change: Callable[[Any], Any], message: str, tiny_model: Any) -> None:
    change(tiny_model)
    assert_refused(lambda: check(tiny_model), "", message)


def share(model: Any) -> None:
    for name in ("mlp.down_proj.weight", "input_layernorm.weight"):
        source, target = (layer.get_parameter(name) for layer in model.model.layers)
        target.data = source.data


def share_layer(model: Any) -> None:
    model.model.layers[1] = model.model.layers[0]


def overlap(model: Any) -> None:
    attention, rows = model.model.layers[0].self_attn, torch.randn(64, 64)
    attention.k_proj.weight, attention.v_proj.weight = nn.Parameter(rows[:32]), nn.Parameter(rows[16:48])


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (share, ("layers.0.", "layers.1.")),
        (share_layer, ("layers.0.", "layers.1.")),
        (overlap, ("0.self_attn.k_proj", "0.self_attn.v_proj")),
    ],
)
def test_weights_that_share_memory_are_named(
    change: Callable[[Any], None], names: tuple[str, str], tiny_model: LlamaForCausalLM
) -> None:
    change(tiny_model)
    assert_refused(lambda: check(tiny_model), "", "share their memory", *names)


def test_parts_of_one_tensor_that_do_not_overlap_pass(tiny_model: LlamaForCausalLM) -> None:
    attention, rows = tiny_model.model.layers[0].self_attn, torch.randn(64, 64)
    attention.k_proj.weight, attention.v_proj.weight = nn.Parameter(rows[:32]), nn.Parameter(rows[32:])
    check(tiny_model)


def test_a_head_that_is_tied_by_hand_is_saved_and_loaded(small: Small, tmp_path: Path) -> None:
    small.model.lm_head.weight = small.model.model.embed_tokens.weight
    _, loaded = small.there_and_back(small.allocate(0.8, latency="any"), tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = models.tiny_model()
    assert_refused(lambda: load_model(model), "model.embed_tokens.weight was made in torch.inference_mode")


def test_a_call_in_inference_mode_gives_the_same_plan(small: Small) -> None:
    plan = small.allocate(0.8, latency="any")
    with torch.inference_mode():
        assert small.allocate(0.8, latency="any") == plan
        compressed = small.compress(plan)
    assert not any(parameter.is_inference() for parameter in compressed.parameters())


@pytest.mark.parametrize("name", ["lm_head", "model.layers.1.mlp", ""])
def test_hooks_that_no_checkpoint_holds_are_refused(name: str, tiny_model: LlamaForCausalLM) -> None:
    handle = tiny_model.get_submodule(name).register_forward_hook(lambda module, inputs, output: output)
    assert_refused(lambda: check(tiny_model), "", "has a forward hook; expected a model without hooks, which")
    handle.remove()
    check(tiny_model)


def test_hooks_of_transformers_pass(tiny_model: LlamaForCausalLM) -> None:
    tiny_model.enable_input_require_grads()
    tiny_model(torch.arange(4)[None], output_hidden_states=True, output_attentions=True)
    assert tiny_model.model.embed_tokens._forward_hooks
    check(tiny_model)
