"""Latents of few bits: what a cache keeps of them, and generation with one in every architecture and kind of cache."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import gac
from gac.compression.rounding import store
from gac.forms import form_named
from gac.healing.straight_through import StraightThrough
from gac.runtime.latents import attention as latents
from gac.runtime.latents import quantise as latent_rounding
from gac.runtime.latents.attention import cache_latents, second_factor
from gac.runtime.latents.quantise import QuantisedLatents, pack_latents, rounded_latents
from gac.runtime.limits import LARGEST, token_words
from gac.runtime.modules import LatentLinear
from gac.schemes import scheme_named
from tests.compression.applying import IDS
from tests.models.small import small_config, weights_of
from tests.runtime.interpreted import DEVICE
from tests.runtime.test_latents import (
    OTHERS,
    K,
    MakePlan,
    V,
    apart,
    changes,
    check_caches,
    generated,
    latent_model,
    steps,
)

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
def llama(request: pytest.FixtureRequest, make_plan: MakePlan) -> Any:
    return rounded_model(small_config("llama", attention_bias=True), make_plan, request.param)


# --- what is kept ----------------------------------------------------------------------------------------------------


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


def test_other_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="latents of 5 bits; expected one of 8, 4"):
        LatentLinear(8, 1, 4, 8, False, bits=5)


# --- every architecture ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("named", "bits"), [("llama", 8), ("llama", 4), ("qwen3", 4), ("mistral with windows", 8)])
def test_generation_with_a_cache_equals_generation_without(named: str, bits: int, make_plan: MakePlan) -> None:
    model_type, changed = OTHERS.get(named, (named, {}))
    config = small_config(model_type, **changed)
    heads = next(weight.heads for weight in weights_of(config) if weight.cached)
    kept = [sum(token_words(heads, layer * rank, bits) for rank in (K, V)) for layer in (1, 2)]
    check_caches(rounded_model(config, make_plan, bits), kept, tolerance=1e-4)


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


# --- how it is read --------------------------------------------------------------------------------------------------


def test_steps_equal_a_reference_that_rounds_by_hand(llama: Any, make_plan: MakePlan) -> None:
    """The plain form with the same factors, and a hook that rounds what its second factors read."""
    config = small_config("llama", attention_bias=True)
    plain = latent_model(config, make_plan, changes(config)).double()
    plain.load_state_dict(llama.state_dict())
    for module in plain.modules():
        if isinstance(module, LatentLinear):
            bits = next(one.second.bits for one in llama.modules() if isinstance(one, LatentLinear))
            groups = len(module.second.weight)
            module.second.register_forward_pre_hook(
                lambda _, given, groups=groups, bits=bits: (by_hand(given[0], groups, bits),)
            )
    with torch.no_grad():
        due = plain(IDS, use_cache=False).logits[:, :11]
    for cache in (DynamicCache(config=llama.config), StaticCache(llama.config, max_cache_len=16)):
        assert (steps(llama, cache) - due).abs().max() < 1e-4


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


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_cache_that_rounds_is_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latents, "QUANTIZED", type(DynamicCache(config=llama.config).layers[0]))
    with pytest.raises(ValueError, match="is a DynamicLayer, which rounds what it keeps; expected one that keeps it"):
        llama(IDS[:, :4], past_key_values=DynamicCache(config=llama.config), use_cache=True)


@pytest.mark.parametrize("name", ["latent:0", "latent:x", "latent:int3", "latent:1:8", "latent:"])
def test_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(gac.core.errors.GacError, match=f"form {name}; expected latent:N with a number of heads"):
        form_named(name)


def test_names_are_those_of_plans() -> None:
    given = ("latent:4", "latent:2", "latent:4:int8", "latent:int4", "latent:2:int8")
    due = ["latent", "latent:2", "latent:int8", "latent:int4", "latent:2:int8"]
    assert [form_named(one).name for one in given] == due
