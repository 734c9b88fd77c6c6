"""Caches of latents: generation with one equals generation without, in every architecture and every kind of cache."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import gac
from gac.core.errors import PlanError
from gac.forms import form_named
from gac.forms.planned_sites import check_forms_fit
from gac.models.families import family_of
from gac.runtime.latents import attention as latents
from tests.compression.applying import IDS
from tests.compression.compressed import MakePlan, compressed
from tests.models.small import VALUE_LAYOUTS, small_config, small_model, weights_of

WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere with norms": ("cohere", {"use_qk_norm": True}),
    "cohere2 with windows": ("cohere2", WINDOWS),
    "exaone4 with windows": ("exaone4", WINDOWS),
    "gemma3 with windows": ("gemma3_text", WINDOWS),
    "mistral with windows": ("mistral", {"sliding_window": 8}),
    "phi with norms": ("phi", {"qk_layernorm": True}),
    "smollm3 with a layer without rotation": ("smollm3", {"no_rope_layers": [1, 0]}),
    "stablelm with norms": ("stablelm", {"qk_layernorm": True}),
}
"""Attentions that make keys in other ways than the smallest configs of their architectures do."""
LEFT = torch.ones_like(IDS)
LEFT[0, :5] = 0
K, V = 7, 5
"""Ranks of the first layer; those of the second are twice as large."""


def changes(config: Any, form: str = "latent:1") -> dict[str, tuple[str, int]]:
    """Ranks that differ by layer, and between keys and values."""
    found = {}
    for weight in weights_of(config):
        if form_named(form).applies_to(weight):
            found[weight.name] = (form, (V if weight.values else K) * (1 + int(".1." in weight.name)))
    return found


def latent_model(config: Any, make_plan: MakePlan, chosen: Mapping[str, tuple[str, int]], fused: bool = False) -> Any:
    """Random factors, and norms that are not all ones."""
    model = compressed(small_model(config), make_plan, chosen, fused)
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def generated(model: Any, mask: Tensor = LEFT, **options: Any) -> Any:
    """Greedy tokens, their logits and the cache."""
    given = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(IDS, attention_mask=mask, **given | options)


def apart(one: Any, other: Any) -> float:
    return float((torch.stack(one.logits) - torch.stack(other.logits)).abs().max())


def numbers(cache: Any) -> list[int]:
    """What each layer keeps of a token."""
    return [one.keys[0, :, 0].numel() + one.values[0, :, 0].numel() for one in cache.layers]


def check_caches(model: Any, kept_by_layer: list[int], tolerance: float) -> None:
    """Generation with a dynamic and a static cache equals that without one, and they keep so much of a token."""
    without = generated(model, use_cache=False)
    size = float(torch.stack(without.logits).abs().max())
    for how in ({}, {"cache_implementation": "static"}):
        cached = generated(model, **how)
        assert apart(without, cached) < tolerance * size
        assert numbers(cached.past_key_values) == kept_by_layer
    assert sum(kept_by_layer) == model.gac_plan.kv_numbers[0]


def steps(model: Any, cache: Any, sizes: tuple[int, ...] = (4, 1, 5, 1)) -> Tensor:
    """Logits of the first tokens, read in parts."""
    found, at = [], 0
    with torch.no_grad():
        for size in sizes:
            positions = torch.arange(at, at + size)[None]
            ids = IDS[:, at : at + size]
            found.append(model(ids, position_ids=positions, past_key_values=cache, use_cache=True).logits)
            at += size
    return torch.cat(found, 1)


@pytest.fixture
def llama(make_plan: MakePlan) -> Any:
    config = small_config("llama", attention_bias=True)
    return latent_model(config, make_plan, changes(config))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of latents of keys that attention has read."""
    found: list[tuple[int, ...]] = []

    def attending(attention: Any, query: Tensor, given: latents.Latents, *rest: Any, **named: Any) -> Any:
        found.append(tuple(given.keys.shape))
        return own(attention, query, given, *rest, **named)

    own = latents.attend_latents
    monkeypatch.setattr(latents, "attend_latents", attending)
    return found


# --- every architecture ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [*VALUE_LAYOUTS, "qwen3", *OTHERS])
def test_generation_with_a_cache_equals_generation_without(named: str, make_plan: MakePlan) -> None:
    model_type, changed = OTHERS.get(named, (named, {}))
    config = small_config(model_type, **changed)
    heads = next(weight.heads for weight in weights_of(config) if weight.cached)
    kept = [heads * (K + V), 2 * heads * (K + V)]
    check_caches(latent_model(config, make_plan, changes(config)), kept, tolerance=1e-5)


# --- what a layer may have -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "fused"), [("latent:1", True), ("latent:2", False), ("latent:2", True)])
def test_heads_in_groups_and_inputs_that_are_shared(form: str, fused: bool, make_plan: MakePlan) -> None:
    config = small_config("llama", num_key_value_heads=4, num_attention_heads=8)
    model = latent_model(config, make_plan, changes(config, form), fused)
    assert apart(generated(model, use_cache=False), generated(model)) < 1e-5
    groups = 4 // int(form.rpartition(":")[2])
    assert numbers(generated(model).past_key_values) == [groups * (K + V), 2 * groups * (K + V)]


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize(("latent", "others"), [("k_proj", "shorter"), ("v_proj", "dense")])
def test_keys_alone_or_values_alone(latent: str, others: str, cache: str | None, make_plan: MakePlan) -> None:
    config = small_config("llama")
    names = {name.rpartition(".")[2]: name for name in changes(config) if ".0." in name}
    chosen = {names[latent]: ("latent:1", V)}
    if others == "shorter" and latent == "k_proj":
        chosen |= {names["v_proj"].replace("v_proj", name): ("head_dim", 16) for name in ("v_proj", "o_proj")}
    model = latent_model(config, make_plan, chosen)
    kept = generated(model, cache_implementation=cache)
    assert apart(generated(model, use_cache=False), kept) < 1e-5
    assert sum(numbers(kept.past_key_values)) == model.gac_plan.kv_numbers[0]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_models_own_attention_runs_over_them(llama: Any, implementation: str) -> None:
    before = generated(llama)
    llama.set_attn_implementation(implementation)
    assert apart(before, generated(llama)) < 1e-5
    configs = (module.config for module in llama.modules() if hasattr(module, "config"))
    assert {config._attn_implementation for config in configs} == {implementation}


# --- how it is read -------------------------------------------------------------------------------------------------


def test_a_prompt_is_rebuilt_once_and_attended_to_as_it_is(llama: Any, read: list[Any]) -> None:
    steps(llama, DynamicCache(config=llama.config), (12,))
    assert read == []
    steps(llama, DynamicCache(config=llama.config), (12, 1))
    assert read == [(2, 13, 2 * K), (2, 13, 4 * K)]


def test_beams(llama: Any) -> None:
    assert torch.equal(*(generated(llama, num_beams=3, use_cache=used).sequences for used in (False, True)))


def test_a_copy_has_its_own(llama: Any) -> None:
    before, other = generated(llama), copy.deepcopy(llama)
    for parameter in llama.parameters():
        parameter.data.zero_()
    assert apart(before, generated(other)) == 0


def test_a_saved_model_caches_latents_when_it_is_opened(llama: Any, tmp_path: Path) -> None:
    before = generated(llama)
    llama.save_pretrained(tmp_path)
    for opened in (gac.load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)):
        after = generated(opened)
        assert apart(before, after) < 1e-5
        assert numbers(after.past_key_values) == numbers(before.past_key_values)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_cache_of_another_model_is_refused(llama: Any) -> None:
    cache = DynamicCache(config=llama.config)
    steps(small_model(small_config("llama")), cache, (4,))
    with pytest.raises(ValueError, match="layer 0 of the cache holds keys of 2 heads of 32 numbers; expected 1 of 14"):
        llama(IDS[:, 4:5], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("model_type", ["gpt2", "phi3"])
def test_one_weight_for_keys_and_values_is_refused(model_type: str) -> None:
    sites = family_of(small_config(model_type)).sites(small_config(model_type))
    with pytest.raises(PlanError, match=f"form latent, which fits no weight of a {model_type} model; expected one of"):
        check_forms_fit(sites, ["latent"], model_type)
