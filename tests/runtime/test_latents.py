"""Caches of latents, rounded or not: generation with one equals generation without, in every architecture and cache."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from gac.compression.rounding import store
from gac.core.errors import GacError, PlanError
from gac.forms import form_named
from gac.forms.planned_sites import check_forms_fit
from gac.healing.straight_through import StraightThrough
from gac.models.families import family_of
from gac.runtime.latents import attention as latents
from gac.runtime.latents import quantise as latent_rounding
from gac.runtime.latents.attention import cache_latents, second_factor
from gac.runtime.latents.quantise import QuantisedLatents, pack_latents, rounded_latents
from gac.runtime.limits import LARGEST, token_words
from gac.runtime.modules import LatentLinear
from gac.schemes import scheme_named
from tests.compression.applying import IDS
from tests.compression.compressed import MakePlan, compressed
from tests.models.small import VALUE_LAYOUTS, small_config, small_model, weights_of
from tests.runtime.interpreted import DEVICE

WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere with norms": ("cohere", {"use_qk_norm": True}),
    "cohere2 with windows": ("cohere2", WINDOWS),
    "exaone4 with windows": ("exaone4", WINDOWS),
    "granitemoehybrid without rotation": ("granitemoehybrid", {"position_embedding_type": None}),
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
    layers = [layer for layer in cache.layers if hasattr(layer, "keys")]
    return [layer.keys[0, :, 0].numel() + layer.values[0, :, 0].numel() for layer in layers]


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


@pytest.mark.parametrize(
    ("named", "bits"),
    [
        *((named, None) for named in (*VALUE_LAYOUTS, "qwen3", *OTHERS)),
        *(("llama", 8), ("llama", 4), ("qwen3", 4), ("mistral with windows", 8)),
    ],
)
def test_generation_with_a_cache_equals_generation_without(named: str, bits: int | None, make_plan: MakePlan) -> None:
    model_type, changed = OTHERS.get(named, (named, {}))
    config = small_config(model_type, **changed)
    cached = [weight for weight in weights_of(config) if weight.cached]
    heads = cached[0].heads
    ranks = [(layer * K, layer * V) for layer in (1, 2) if any(f".{layer - 1}." in weight.name for weight in cached)]
    if bits:
        model, tolerance = rounded_model(config, make_plan, bits), 1e-4
        kept = [sum(token_words(heads, rank, bits) for rank in pair) for pair in ranks]
    else:
        model, tolerance = latent_model(config, make_plan, changes(config)), 1e-5
        kept = [heads * sum(pair) for pair in ranks]
    without = generated(model, use_cache=False)
    for how in ({}, {"cache_implementation": "static"})[: 1 if model_type == "falcon_h1" else 2]:
        cached = generated(model, **how)
        assert apart(without, cached) < tolerance * float(torch.stack(without.logits).abs().max())
        assert numbers(cached.past_key_values) == kept
    assert sum(kept) == model.gac_plan.kv_numbers[0]


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


BITS = (8, 4)


def rounded_model(config: Any, make_plan: MakePlan, bits: int) -> Any:
    """In double precision: then what a sum is off by changes next to no number that is rounded."""
    return latent_model(config, make_plan, changes(config, f"latent:1:int{bits}")).double()


def held_bytes(cache: Any) -> int:
    """Of a token, in all layers."""
    parts = [one[0, :, 0] for layer in cache.layers for one in (layer.keys, layer.values)]
    return sum(part.numel() * part.element_size() for part in parts)


def by_hand(latents: Tensor, groups: int, bits: int) -> Tensor:
    """One token and group after the other."""
    found = latents.clone()
    for part in found.view(-1, latents.shape[-1] // groups):
        scale = (part.abs().max().float() / LARGEST[bits]).bfloat16().float()
        whole = [max(-LARGEST[bits], min(LARGEST[bits], round(float(one) / (float(scale) or 1.0)))) for one in part]
        part.copy_(torch.tensor(whole) * scale)
    return found


@pytest.fixture(params=BITS)
def rounded_llama(request: pytest.FixtureRequest, make_plan: MakePlan) -> Any:
    return rounded_model(small_config("llama", attention_bias=True), make_plan, request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("groups", "rank"), [(1, 1), (2, 7), (1, 66)])
@pytest.mark.parametrize("bits", BITS)
def test_words_hold_what_rounding_gives(bits: int, groups: int, rank: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(2, 5, groups * rank, generator=generator).to(dtype)
    given[0, 0], given[0, 1, 0] = 0, 1e4
    words, found = pack_latents(given, groups, bits)
    assert words.dtype == torch.int16
    assert words.shape == (2, 5, token_words(groups, rank, bits))
    assert torch.equal(QuantisedLatents(words, groups, rank, bits).values(dtype), found)
    assert torch.equal(found, by_hand(given, groups, bits))
    steps_of = given.float().unflatten(-1, (groups, -1)).abs().amax(-1, keepdim=True) / LARGEST[bits]
    off = (found.float() - given.float()).unflatten(-1, (groups, -1)).abs()
    assert (off <= 0.51 * steps_of + 4e-3 * given.float().unflatten(-1, (groups, -1)).abs()).all()


@pytest.mark.parametrize(("groups", "rank"), [(2, 7), (3, 8), (1, 66)])
@pytest.mark.parametrize("bits", BITS)
def test_the_kernel_finds_the_same_words(bits: int, groups: int, rank: int) -> None:
    """In float16, to which Triton's interpreter rounds as a GPU does; of rows that lie apart too."""
    wide = torch.randn(2, 5, 2 * groups * rank, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    given = wide[..., : groups * rank]
    given[0, 0], given[0, 1, 0], given[1, 1, 0] = 0, 1e4, torch.nan
    words, found = latent_rounding.round_latents.__wrapped__(given, groups, bits)
    due, as_due = pack_latents(given.cpu(), groups, bits)
    there = ~as_due.view(2, 5, groups, -1).isnan().any(-1)
    assert torch.equal(found.cpu().isnan(), as_due.isnan())
    assert torch.equal(found.cpu().nan_to_num(), as_due.nan_to_num())
    same = QuantisedLatents(words.cpu(), groups, rank, bits), QuantisedLatents(due, groups, rank, bits)
    assert torch.equal(*(one.values(torch.float16)[there.repeat_interleave(rank, -1)] for one in same))
    assert torch.equal(words.cpu()[there.all(-1)], due[there.all(-1)])


def test_gradients_pass_as_if_nothing_were_rounded() -> None:
    given = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = rounded_latents(given, 2, 4)
    found.square().sum().backward()
    assert torch.equal(found.detach(), rounded_latents(given.detach(), 2, 4))
    assert given.grad is not None
    assert torch.allclose(given.grad, 2 * found.detach())


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("forms", [("latent:1:int8", "latent:1"), ("latent:1", "latent:1:int4"), ("latent:1:int4", "")])
def test_the_cache_that_runs_has_the_bytes_of_the_plan(
    forms: tuple[str, str], cache: str | None, make_plan: MakePlan
) -> None:
    """Of a model in 16 bits, keys and values in forms of their own; without one they stay dense."""
    config, chosen = small_config("llama"), {}
    for name, (_, dim) in changes(config).items():
        if form := forms[name.endswith("v_proj")]:
            chosen[name] = (form, dim)
    model = latent_model(config, make_plan, chosen)
    without = generated(model.double(), use_cache=False)
    assert apart(without, generated(model, cache_implementation=cache)) < 1e-4
    kept = generated(model.bfloat16(), cache_implementation=cache).past_key_values
    assert held_bytes(kept) == 2 * model.gac_plan.kv_numbers[0]


def test_steps_equal_a_reference_that_rounds_by_hand(rounded_llama: Any, make_plan: MakePlan) -> None:
    """The plain form with the same factors, and a hook that rounds what its second factors read."""
    config = small_config("llama", attention_bias=True)
    plain = latent_model(config, make_plan, changes(config)).double()
    plain.load_state_dict(rounded_llama.state_dict())
    for module in plain.modules():
        if isinstance(module, LatentLinear):
            bits = next(one.second.bits for one in rounded_llama.modules() if isinstance(one, LatentLinear))
            groups = len(module.second.weight)
            module.second.register_forward_pre_hook(
                lambda _, given, groups=groups, bits=bits: (by_hand(given[0], groups, bits),)
            )
    with torch.no_grad():
        due = plain(IDS, use_cache=False).logits[:, :11]
    for cache in (DynamicCache(config=rounded_llama.config), StaticCache(rounded_llama.config, max_cache_len=16)):
        assert (steps(rounded_llama, cache) - due).abs().max() < 1e-4


def test_second_factors_in_few_bits_read_rounded_latents(make_plan: MakePlan) -> None:
    """As they are stored, and while they are trained."""
    config = small_config("llama")
    chosen = {name: (form, 32) for name, (form, _) in changes(config, "latent:1:int8").items()}
    model = latent_model(config, make_plan, chosen)
    scheme = scheme_named("w8a16")
    for name in chosen:
        model.set_submodule(name, store(scheme, model.get_submodule(name)))
    cache_latents(model)
    assert {second_factor(model.get_submodule(name)).bits for name in chosen} == {8}
    assert apart(generated(model, use_cache=False), generated(model)) < 1e-3
    second = model.get_submodule(next(iter(chosen))).second
    x = torch.randn(2, 3, second.in_features, generator=torch.Generator().manual_seed(0))
    grid = scheme.grid(second.tensors, *second.matrix)
    assert grid is not None
    assert torch.allclose(StraightThrough(second, scheme, grid)(x), second(x), atol=1e-5)


def test_a_cache_that_rounds_is_refused(rounded_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latents, "QUANTIZED", type(DynamicCache(config=rounded_llama.config).layers[0]))
    with pytest.raises(ValueError, match="is a DynamicLayer, which rounds what it keeps; expected one that keeps it"):
        rounded_llama(IDS[:, :4], past_key_values=DynamicCache(config=rounded_llama.config), use_cache=True)


def test_names_are_those_of_plans_and_others_are_refused() -> None:
    given = ("latent:4", "latent:2", "latent:4:int8", "latent:int4", "latent:2:int8")
    due = ["latent", "latent:2", "latent:int8", "latent:int4", "latent:2:int8"]
    assert [form_named(one).name for one in given] == due
    for name in ("latent:0", "latent:x", "latent:int3", "latent:1:8", "latent:"):
        with pytest.raises(GacError, match=f"form {name}; expected latent:N with a number of heads"):
            form_named(name)
    with pytest.raises(ValueError, match="latents of 5 bits; expected one of 8, 4"):
        LatentLinear(8, 1, 4, 8, False, bits=5)
