"""Keys and values of few bits in a cache: what is read equals a reference by hand, in every use of a cache."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from gac.runtime.latents.rounded import RoundedLayer, Rounding
from gac.runtime.limits import BLOCK, EXACT, block_words
from tests.compression.compressed import MakePlan, compressed
from tests.models.small import small_config, small_model, weights_of

TOKENS = EXACT + 2 * BLOCK + 30
IDS = torch.randint(0, 60, (2, TOKENS), generator=torch.Generator().manual_seed(0))
LEFT = torch.ones_like(IDS)
LEFT[0, :70] = 0
BITS = (("kv_bits", 4), ("kv_bits", 3))


def rounded_model(make_plan: MakePlan, keys: Any, values: Any, **changed: Any) -> Any:
    """Keys and values of all layers in these forms; ``None``: dense."""
    config = small_config("llama", max_position_embeddings=1024, **changed)
    chosen: dict[str, tuple[str, int]] = {}
    for weight in weights_of(config):
        form = {"k_proj": keys, "v_proj": values}.get(weight.name.rpartition(".")[2])
        if form is None and values and values[0] == "head_dim" and weight.values:
            form = values
        if form is not None:
            chosen[weight.name] = form
    return compressed(small_model(config), make_plan, chosen).double()


def read_in(model: Any, sizes: tuple[int, ...], cache: Any = None, mask: Tensor | None = None) -> Tensor:
    """Logits of all tokens, read in parts."""
    cache, found, at = cache or DynamicCache(config=model.config), [], 0
    with torch.no_grad():
        for size in (*sizes, TOKENS - sum(sizes)):
            until = at + size
            given: Mapping[str, Any] = {} if mask is None else {"attention_mask": mask[:, :until]}
            found.append(model(IDS[:, at:until], past_key_values=cache, use_cache=True, **given).logits)
            at = until
    return torch.cat(found, 1)


def alone(model: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(IDS, use_cache=False, **options).logits
    return logits


def by_hand(numbers: Tensor, bits: int) -> Tensor:
    """One row of numbers, rounded."""
    top = 2**bits - 1
    middle = ((numbers.min() + numbers.max()) / 2).bfloat16().float()
    step = ((numbers.max() - numbers.min()) / top).bfloat16().float()
    whole = ((numbers - middle) / step + top / 2).round().clamp(0, top)
    return (whole - top / 2) * step + middle


def rounded_by_hand(states: Tensor, bits: int, keys: bool) -> Tensor:
    """Keys or values ``(tokens, channels)``, those of whole blocks, one row after the other."""
    found = states.clone()
    for block in found.float().split(BLOCK) if len(states) % BLOCK == 0 else ():
        rows = block.T if keys else block.reshape(-1, BLOCK if states.shape[1] % BLOCK == 0 else states.shape[1])
        done = torch.stack([by_hand(row, bits) for row in rows])
        block.copy_(done.T if keys else done.reshape(block.shape))
        found[: len(block)] = block
        states, found = states, found
    return found


def reference(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    """Query by query: what its token would read if it were decoded."""
    mixed = torch.zeros_like(query)
    bits = BITS[0][1], BITS[1][1]
    for row in range(len(query)):
        blocks: dict[int, list[Tensor]] = {}
        for start in range(0, key.shape[2] - BLOCK + 1, BLOCK):
            parts = (states[row, :, start : start + BLOCK].transpose(0, 1).flatten(1) for states in (key, value))
            blocks[start] = [
                rounded_by_hand(part, count, kind).unflatten(1, (key.shape[1], -1)).transpose(0, 1)
                for part, count, kind in zip(parts, bits, (True, False), strict=True)
            ]
        for token in range(query.shape[2]):
            keys, values = (states[row, :, : token + 1].clone() for states in (key, value))
            for start in range(0, token - EXACT - BLOCK + 1, BLOCK):
                keys[:, start : start + BLOCK], values[:, start : start + BLOCK] = blocks[start]
            times = query.shape[1] // key.shape[1]
            scores = (query[row, :, token, None] * keys.repeat_interleave(times, 0)).sum(-1) * scaling
            scores = scores + mask[min(row, len(mask) - 1), :, token, : token + 1]
            mixed[row, :, token] = (scores.softmax(-1)[..., None] * values.repeat_interleave(times, 0)).sum(1)
    return mixed.transpose(1, 2), None


@pytest.fixture
def llama(make_plan: MakePlan) -> Any:
    return rounded_model(make_plan, *BITS)


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("channels", [64, 24])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_words_hold_what_rounding_gives(bits: int, channels: int, keys: bool) -> None:
    given = torch.randn(2, 2 * BLOCK, channels, generator=torch.Generator().manual_seed(0))
    given[0, 3, 1], given[1] = 1e4, 0
    rounding = Rounding(bits, keys)
    words = rounding.packed(given)
    assert words.dtype == torch.int16
    assert words.shape == (2, 2, block_words(channels, bits, keys))
    assert torch.equal(rounding.unpacked(words, channels), rounding.rounded(given))
    due = torch.cat([rounded_by_hand(block, bits, keys) for block in given[0].split(BLOCK)])
    assert torch.allclose(rounding.rounded(given)[0], due, atol=1e-6)
    assert not rounding.rounded(given)[1].any()


def test_gradients_pass_as_if_nothing_were_rounded() -> None:
    given = torch.randn(1, BLOCK, 24, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = Rounding(4, True).rounded(given)
    found.square().sum().backward()
    assert given.grad is not None
    assert torch.allclose(given.grad, 2 * found.detach())


def test_every_query_reads_what_a_reference_by_hand_reads(llama: Any) -> None:
    plain = small_model(small_config("llama", max_position_embeddings=1024)).double()
    plain.load_state_dict(llama.state_dict())
    AttentionInterface.register("by_hand", reference)
    AttentionMaskInterface.register("by_hand", eager_mask)
    plain.set_attn_implementation("by_hand")
    due = alone(plain)
    assert (alone(llama) - due).abs().max() < 1e-6
    assert (read_in(llama, (EXACT + BLOCK + 3, 1, 1)) - due).abs().max() < 1e-6
    plain.set_attn_implementation("sdpa")
    assert (alone(plain) - due).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("implementation", "mask"), [("eager", None), ("sdpa", None), ("sdpa", LEFT), ("sdpa", LEFT.flip(1))]
)
def test_parts_of_a_text_and_padding(llama: Any, implementation: str, mask: Tensor | None) -> None:
    llama.set_attn_implementation(implementation)
    due = alone(llama, attention_mask=mask)
    steps = (1,) * 20
    for sizes in ((), (EXACT,), (EXACT + BLOCK - 1, *steps), (BLOCK, 2 * BLOCK, 1, 2)):
        found = read_in(llama, sizes, mask=mask)
        there = torch.ones_like(IDS, dtype=torch.bool) if mask is None else mask.bool()
        assert (found - due)[there].abs().max() < 1e-6


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (BITS[0], None),
        (None, BITS[1]),
        (BITS[0], ("latent:1", 6)),
        (("latent:1:int4", 8), BITS[1]),
        (BITS[0], ("head_dim", 8)),
    ],
)
def test_beside_latents_shorter_values_and_dense_ones(keys: Any, values: Any, make_plan: MakePlan) -> None:
    model = rounded_model(make_plan, keys, values)
    due = alone(model)
    for sizes in ((), (EXACT + BLOCK - 1, 1, 1, 1), (40, 200)):
        assert (read_in(model, sizes) - due).abs().max() < 1e-4


def test_beams_and_tokens_taken_back(llama: Any) -> None:
    given = {"attention_mask": LEFT, "max_new_tokens": 4, "num_beams": 2, "do_sample": False}
    assert torch.equal(*(llama.generate(IDS, use_cache=used, **given) for used in (False, True)))
    due, cache = alone(llama), DynamicCache(config=llama.config)
    with torch.no_grad():
        until = TOKENS - 1
        llama(IDS[:, :until], past_key_values=cache, use_cache=True)
        cache.crop(-20)
        last = llama(IDS[:, until - 20 :], past_key_values=cache, use_cache=True).logits
    assert cache.get_seq_length() == TOKENS
    assert (last - due[:, until - 20 :]).abs().max() < 1e-6


def test_a_crop_into_a_block_goes_on_with_rounded_numbers(llama: Any) -> None:
    cache = DynamicCache(config=llama.config)
    read_in(llama, (), cache)
    layer = cache.layers[0]
    assert isinstance(layer, RoundedLayer)
    assert layer.blocks == 2
    cache.crop(BLOCK + 7 - TOKENS)
    assert (layer.blocks, layer.get_seq_length(), layer.keys.shape[-2]) == (1, BLOCK + 7, 7)
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0, 3]))
    assert {len(part) for part in (layer.keys, layer.values, *layer.old)} == {2}


def test_the_cache_has_the_bytes_of_the_plan(llama: Any) -> None:
    llama.bfloat16()
    cache = DynamicCache(config=llama.config)
    read_in(llama, (), cache)
    words = sum(part[0].numel() for layer in cache.layers for part in layer.old)
    assert words == llama.gac_plan.kv_numbers[0] * 2 * BLOCK
    exact = {part.shape[-2] for layer in cache.layers for part in (layer.keys, layer.values)}
    assert exact == {TOKENS - 2 * BLOCK}


def test_caches_and_attentions_that_cannot_are_refused(llama: Any, make_plan: MakePlan) -> None:
    with pytest.raises(ValueError, match=r"layer 0 of the cache is a StaticLayer .*; expected an empty DynamicLayer"):
        read_in(llama, (), StaticCache(llama.config, max_cache_len=TOKENS))
    filled = DynamicCache(config=llama.config)
    small = small_model(small_config("llama", max_position_embeddings=1024)).double()
    read_in(small, (), filled)
    with pytest.raises(ValueError, match=f"is a DynamicLayer with {TOKENS} tokens; expected an empty DynamicLayer"):
        llama(IDS[:, :1], past_key_values=filled, use_cache=True)
    AttentionInterface.register("other", reference)
    AttentionMaskInterface.register("other", eager_mask)
    llama.set_attn_implementation("other")
    with pytest.raises(ValueError, match="attention other over keys and values of few bits; expected sdpa"):
        alone(llama)
