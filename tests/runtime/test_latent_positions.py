"""Positions of cached latents: a cache gives what the same text gives alone, wherever its padding is."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, QuantizedLayer, StaticLayer

from gac.runtime.kernels.latent_attention.layout import with_runs
from gac.runtime.latents.attention import _Caching
from tests.models.small import small_config, small_model
from tests.runtime.test_latents import OTHERS, MakePlan, changes, latent_model

PAD = 257
TEXT = [65, 66, 67, 68]
TWELVE = torch.arange(24).reshape(2, 12) * 7 % 250
RANDOM = torch.tensor([[0, 1, 2, 2, 7, 8, 9, 3, 0, 1, 40, 41], [5, 5, 5, 6, 7, 1, 0, 9, 10, 11, 12, 13]])
"""Positions that repeat, jump and go back."""
SHOWN = torch.tensor([[1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]])
"""A mask with padding anywhere."""
ALL = torch.ones_like(SHOWN)
"""A mask of every token; without one, positions that go back would divide a text into several."""
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 8}
    | {"short_factor": [1.0 + at / 8 for at in range(16)], "long_factor": [2.0 + at for at in range(16)]},
}
"""Rotary embeddings; a text of 12 tokens is longer than their original length of 8."""


def quantized_cache(config: Any) -> Cache:
    """A cache that rounds nothing, so that results are exact, but is laid out as one that rounds."""

    class Layer(QuantizedLayer):
        def __init__(self) -> None:
            super().__init__(residual_length=4)

        def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
            return tensor.clone()

        def _dequantize(self, q_tensor: Tensor) -> Tensor:
            return q_tensor

    return Cache(layers=[Layer() for _ in range(config.num_hidden_layers)])


CACHES: dict[str, Callable[[Any], Cache]] = {
    "dynamic": lambda config: DynamicCache(config=config),
    "dynamic without a config": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config, max_cache_len=16),
    "quantised": quantized_cache,
}


@pytest.fixture
def llama(make_plan: MakePlan) -> Any:
    return model_of("llama", make_plan, attention_bias=True)


def model_of(model_type: str, make_plan: MakePlan, **changed: Any) -> Any:
    config = small_config(model_type, **changed)
    return sharp(latent_model(config, make_plan, changes(config)))


def sharp(model: Any) -> Any:
    """With larger weights, so that attention is far from uniform and positions matter."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(20 if "embed" in name else 4)
    return model.requires_grad_(False)


def merged(model: Any) -> Any:
    """The same function, whose cache keeps keys and values."""
    dense = copy.deepcopy(model)
    for module in dense.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, _Caching):
                del module._forward_pre_hooks[key]
    return dense


def at_once(model: Any, tokens: int = 12) -> Tensor:
    """Logits of a batch of texts, without a cache."""
    given = {"attention_mask": SHOWN[:, :tokens], "position_ids": RANDOM[:, :tokens]}
    logits: Tensor = model(TWELVE[:, :tokens], use_cache=False, **given).logits
    return logits


def in_parts(
    model: Any,
    cache: Any,
    sizes: tuple[int, ...],
    positions: Tensor = RANDOM,
    mask: Tensor | None = SHOWN,
    begin: int = 0,
) -> Tensor:
    """Logits of these texts, from a token on, that are read in parts."""
    logits = []
    for size in sizes:
        end = begin + size
        given = {"attention_mask": None if mask is None else mask[:, :end], "position_ids": positions[:, begin:end]}
        logits.append(model(TWELVE[:, begin:end], past_key_values=cache, use_cache=True, **given).logits)
        begin = end
    return torch.cat(logits, 1)


def largest_error(found: Tensor, due: Tensor, mask: Tensor | None = SHOWN) -> float:
    """Of tokens that are shown, relative to the largest logit."""
    shown = torch.ones_like(TWELVE) if mask is None else mask
    return float((found - due).abs()[shown[:, : due.shape[1]].bool()].max() / due.abs().max())


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("ids", "mask", "positions"),
    [
        ([PAD, PAD, 65, 66, 67], [0, 0, 1, 1, 1], [0, 0, 0, 1, 2]),
        ([65, 66, 67, PAD, PAD], [1, 1, 1, 0, 0], None),
        ([65, PAD, 66, PAD, 67], [1, 0, 1, 0, 1], [0, 1, 1, 1, 2]),
    ],
    ids=["left", "right without position_ids", "inside"],
)
def test_padding_of_a_prompt(llama: Any, kind: str, ids: list[int], mask: list[int], positions: Any) -> None:
    cache = CACHES[kind](llama.config)
    given = {} if positions is None else {"position_ids": torch.tensor([positions])}
    llama(torch.tensor([ids]), attention_mask=torch.tensor([mask]), past_key_values=cache, use_cache=True, **given)
    found = llama(
        torch.tensor([TEXT[-1:]]),
        attention_mask=torch.tensor([[*mask, 1]]),
        position_ids=torch.tensor([[3]]),
        past_key_values=cache,
        use_cache=True,
    ).logits[0, -1]
    due = llama(torch.tensor([TEXT]), use_cache=False).logits[0, -1]
    assert (found - due).abs().max() < 1e-5 * due.abs().max()


@pytest.mark.parametrize("kind", CACHES)
def test_any_positions(llama: Any, kind: str) -> None:
    assert largest_error(in_parts(llama, CACHES[kind](llama.config), (5, 1, 1, 4, 1)), at_once(llama)) < 1e-5


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["mistral with windows", "gemma3 with windows"])
def test_windows(name: str, static: bool, make_plan: MakePlan) -> None:
    model_type, changed = OTHERS[name]
    model = model_of(model_type, make_plan, **(changed | {"sliding_window": 5}))
    due = in_parts(merged(model), DynamicCache(config=model.config), (3, 1, 5, 1, 2), mask=None)
    cache = StaticCache(model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
    assert largest_error(in_parts(model, cache, (3, 1, 5, 1, 2), mask=None), due, None) < 1e-5


def test_one_table_serves_layers_alike(make_plan: MakePlan) -> None:
    """8 bytes a token; a layer of a window and one of all tokens have one each."""
    kinds = ["sliding_attention", "full_attention"] * 2
    model = model_of("gemma3_text", make_plan, num_hidden_layers=4, sliding_window=8, layer_types=kinds)
    cache = DynamicCache(config=model.config)
    in_parts(model, cache, (5, 1))
    assert [hasattr(layer, "positions") for layer in cache.layers] == [True, True, False, False]
    assert [type(layer).__bases__[0] for layer in cache.layers[:2]] == [DynamicSlidingWindowLayer, DynamicLayer]
    tables = [layer.positions for layer in cache.layers[:2]]
    assert [(table.keys.nbytes, table.values.nbytes) for table in tables] == [(2 * 6 * 8, 0)] * 2


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("model_type", ["phi", "gemma3_text"])
def test_frequencies_are_those_of_each_call(model_type: str, rope: str, make_plan: MakePlan) -> None:
    """As in the dense model, whose cached keys stay as they were rotated; longer than the original length."""
    pairs = {"phi": 4}.get(model_type, 16)
    rope_parameters = {name: made[:pairs] if isinstance(made, list) else made for name, made in ROPES[rope].items()}
    rope_parameters |= {"rope_theta": 1e4} | ({"partial_rotary_factor": 0.5} if model_type == "phi" else {})
    if model_type == "gemma3_text":
        local = ROPES["default"] | {"rope_theta": 1e4}
        rope_parameters = {"full_attention": rope_parameters, "sliding_attention": local}
    config = {"max_position_embeddings": 32 if rope == "longrope" else 8, "rope_parameters": rope_parameters}
    windows = {"layer_types": ["sliding_attention", "full_attention"]} if model_type == "gemma3_text" else {}
    model = model_of(model_type, make_plan, **config, **windows)
    positions, sizes = torch.arange(12).expand(2, -1), (6, 1, 3, 1, 1)
    dense = merged(model)
    cache = "static" if rope == "longrope" else "dynamic"
    due, found = (in_parts(one, CACHES[cache](model.config), sizes, positions, None) for one in (dense, model))
    assert largest_error(found, due, None) < 1e-5


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_tokens_taken_back(llama: Any, kind: str) -> None:
    cache = CACHES[kind](llama.config)
    in_parts(llama, cache, (5, 3))
    cache.crop(-2)
    due = at_once(llama, 9)
    found = torch.cat((due[:, :6], in_parts(llama, cache, (1, 1, 1), begin=6)), 1)
    assert largest_error(found, due) < 1e-5


@pytest.mark.parametrize(("kind", "rope"), [("dynamic", "dynamic"), ("static", "default"), ("quantised", "default")])
def test_rows_in_another_order(kind: str, rope: str, make_plan: MakePlan) -> None:
    """As beam search orders them."""
    model = model_of("llama", make_plan, max_position_embeddings=8, rope_parameters=ROPES[rope] | {"rope_theta": 1e4})
    dense, found = merged(model), []
    for one in (dense, model):
        cache = CACHES[kind](model.config)
        in_parts(one, cache, (5, 2))
        cache.reorder_cache(torch.tensor([1, 0]))
        found.append(in_parts(one, cache, (1,), RANDOM.flip(0), SHOWN.flip(0), begin=7))
    assert (found[0] - found[1]).abs().max() < 1e-5 * found[0].abs().max()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_an_emptied_cache(llama: Any, kind: str) -> None:
    cache = CACHES[kind](llama.config)
    in_parts(llama, cache, (7,))
    cache.reset()
    due = llama(TWELVE, attention_mask=ALL, position_ids=RANDOM.flip(1), use_cache=False).logits
    assert largest_error(in_parts(llama, cache, (5, 1, 6), RANDOM.flip(1), ALL), due, ALL) < 1e-5


@pytest.mark.parametrize(("kind", "how"), [("dynamic", "pickled"), ("static", "copied")])
def test_a_copy_of_a_cache(llama: Any, kind: str, how: str) -> None:
    """It goes on by itself, and the original too; layers still share their positions."""
    cache = CACHES[kind](llama.config)
    in_parts(llama, cache, (5, 2))
    other = copy.deepcopy(cache) if how == "copied" else pickle.loads(pickle.dumps(cache))
    assert all(isinstance(layer, (DynamicLayer, StaticLayer)) for layer in other.layers)
    due = at_once(llama)
    for one in (other, cache):
        assert largest_error(torch.cat((due[:, :7], in_parts(llama, one, (5,), begin=7)), 1), due) < 1e-5


def test_assisted_generation(llama: Any) -> None:
    """Draft tokens are taken back from both caches; a window records its past for that."""
    prompt = torch.tensor([[65, 66, 67, 65, 66, 67, 65, 66]])
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    due = llama.generate(prompt, use_cache=False, **options)
    assert torch.equal(llama.generate(prompt, prompt_lookup_num_tokens=3, **options), due)
    assert torch.equal(llama.generate(prompt, assistant_model=small_model(small_config("llama")), **options), due)


@pytest.mark.usefixtures("nothing_compiled")
def test_a_compiled_step(llama: Any) -> None:
    """One graph for every step; positions may jump."""
    cache = StaticCache(llama.config, max_cache_len=16)
    found = [in_parts(llama, cache, (6,))]
    compiled = torch.compile(llama, backend="eager", fullgraph=True)
    for at in range(6, 12):
        padded = torch.nn.functional.pad(SHOWN[:, : at + 1], (0, 15 - at))
        mask = (padded[:, None, None, :] != 0) & (torch.arange(16) <= at)
        given = {"position_ids": RANDOM[:, at : at + 1], "attention_mask": mask}
        found.append(compiled(TWELVE[:, at : at + 1], past_key_values=cache, use_cache=True, **given).logits)
    assert largest_error(torch.cat(found, 1), at_once(llama)) < 1e-5


def test_tokens_without_positions_are_refused(llama: Any) -> None:
    cache = DynamicCache(config=llama.config)
    in_parts(llama, cache, (5,))
    stripped = DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
    with pytest.raises(ValueError, match="layer 0 of the cache holds tokens without positions; expected an"):
        in_parts(llama, stripped, (1,), mask=None)


def test_runs_of_positions() -> None:
    ids = torch.tensor([[3, 4, 5, 5, 6, 0], [0, 1, 2, 3, 4, 5]])
    table = with_runs(ids)
    assert torch.equal(table[..., 0], ids)
    assert table[..., 1].tolist() == [[1, 2, 3, 1, 2, 1], [1, 2, 3, 4, 5, 6]]
    rest = with_runs(torch.tensor([[1, 2], [7, 8]]), table[:, -1:])
    assert rest[..., 1].tolist() == [[2, 3], [1, 2]]
