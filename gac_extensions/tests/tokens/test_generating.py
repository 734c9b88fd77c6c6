"""Generation with a press: the tokens of a loop by hand, or a refusal by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StaticCache

import gac
from gac.core.errors import GacError, ModelError, PlanError
from gac_extensions.tokens.presses import known_presses
from tests.models.small import small_config, small_model
from tests.small_pipeline import Small

pytest.importorskip("kvpress", exc_type=ImportError)
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 6}
CONTEXT = 64


def sharp(family: str = "llama", **changed: Any) -> PreTrainedModel:
    """A model whose attention is not flat, so that every token kept matters."""
    model = small_model(small_config(family, **changed))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(20 if "embed" in name else 4)
    return model


def planned(small: Small, model: PreTrainedModel, press: Any = "knorm", **changed: Any) -> gac.TokenPlan:
    options = {"calibration": f"{small.text}:1x80", "following": 16, "step": 8, "shares": (0.25, 0.5)} | changed
    return gac.allocate_tokens(model, 0.5, press=press, tokenizer=small.tokenizer, progress=False, **options)


def prompt(rows: int = 1) -> Tensor:
    return torch.randint(1, 250, (rows, CONTEXT), generator=torch.Generator().manual_seed(1))


def continued(model: Any, cache: DynamicCache, logits: Tensor, position: int, count: int) -> Tensor:
    """The likeliest tokens, one forward pass each, at explicit positions."""
    tokens = []
    for index in range(position, position + count):
        tokens.append(logits[:, -1].argmax(-1, keepdim=True))
        positions = torch.full_like(tokens[-1], index)
        logits = model(input_ids=tokens[-1], past_key_values=cache, position_ids=positions).logits
    return torch.cat(tokens, 1)


def by_hand(model: Any, press: Any, ids: Tensor, count: int = GREEDY["max_new_tokens"]) -> Tensor:
    with torch.inference_mode(), press(model):
        cache = DynamicCache(config=model.config)
        logits = model(input_ids=ids, past_key_values=cache).logits
        return torch.cat([ids, continued(model, cache, logits, ids.shape[1], count)], 1)


@pytest.fixture
def model() -> PreTrainedModel:
    return sharp()


@pytest.fixture
def press(small: Small, model: PreTrainedModel) -> Any:
    return gac.press(planned(small, model))


@pytest.mark.parametrize("rows", [1, 2])
def test_greedy_tokens_equal_a_loop(model: Any, press: Any, rows: int) -> None:
    ids = prompt(rows)
    with press(model):
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    assert torch.equal(tokens, by_hand(model, press, ids))


def test_beam_scores(model: Any, press: Any) -> None:
    ids = prompt()
    with press(model):
        beams = model.generate(
            ids,
            num_beams=3,
            num_return_sequences=3,
            length_penalty=0,
            output_scores=True,
            return_dict_in_generate=True,
            **GREEDY,
        )
        for tokens, score in zip(beams.sequences, beams.sequences_scores, strict=True):
            cache = DynamicCache(config=model.config)
            first = model(input_ids=ids, past_key_values=cache).logits[:, -1:]
            after = model(input_ids=tokens[None, CONTEXT:-1], past_key_values=cache).logits
            chances = torch.cat([first, after], 1)[0].log_softmax(-1)
            wanted = chances.gather(-1, tokens[CONTEXT:, None]).sum()
            torch.testing.assert_close(score, wanted.detach(), rtol=1e-3, atol=1e-3)


def test_conversations_continue_at_their_positions(model: Any, press: Any) -> None:
    ids, more = prompt(), prompt()[:, :9].flip(1)
    with press(model):
        first = model.generate(ids, return_dict_in_generate=True, **GREEDY)
        cache = getattr(first, "past_key_values", None) or first.cache
        assert cache.get_seq_length() == CONTEXT + GREEDY["max_new_tokens"] - 1
        turn = torch.cat([first.sequences, more], 1)
        second = model.generate(turn, past_key_values=cache, **GREEDY)
        fresh = DynamicCache(config=model.config)
        logits = model(input_ids=ids, past_key_values=fresh).logits
        for index in range(CONTEXT, turn.shape[1]):
            positions = torch.tensor([[index]])
            logits = model(input_ids=turn[:, index : index + 1], past_key_values=fresh, position_ids=positions).logits
        wanted = continued(model, fresh, logits, turn.shape[1], GREEDY["max_new_tokens"])
    assert torch.equal(second[:, turn.shape[1] :], wanted)


def test_crop(model: Any, press: Any) -> None:
    ids, more = prompt(), prompt()[:, :5]
    with torch.inference_mode(), press(model):
        cache = DynamicCache(config=model.config)
        model(input_ids=ids, past_key_values=cache)
        once = model(input_ids=more, past_key_values=cache).logits
        cache.crop(-5)
        assert torch.equal(model(input_ids=more, past_key_values=cache).logits, once)
        with pytest.raises(GacError, match="cropped to 63 tokens; expected at least 64"):
            cache.crop(-6)
        mask = torch.ones(1, CONTEXT + 5, dtype=torch.long)
        mask[0, CONTEXT] = 0
        with pytest.raises(GacError, match="a padded batch with a press"):
            model(input_ids=more, attention_mask=mask, past_key_values=cache)


REFUSED: dict[str, dict[str, Any]] = {
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 4},
    "assistant_model": {"assistant_model": small_model(small_config("llama"))},
    "the options of assisted_generation": {"assistant_early_exit": 1},
    "the options of contrastive_search": {"penalty_alpha": 0.6, "top_k": 4},
    "prefill_chunk_size": {"prefill_chunk_size": 16},
    "custom_generate": {"custom_generate": lambda **_: None},
    "cache_implementation": {"cache_implementation": "static"},
    "prompt_lookup_num_tokens ": {"generation_config": GenerationConfig(prompt_lookup_num_tokens=4)},
}


@pytest.mark.parametrize("option", REFUSED)
def test_unsupported_generation(model: Any, press: Any, option: str) -> None:
    with press(model), pytest.raises(GacError, match=f"generate with {option.strip()} and a press"):
        model.generate(prompt(), **GREEDY | REFUSED[option])
    assert "generate" not in vars(model)


def test_unsupported_runs(model: Any, press: Any) -> None:
    padded = torch.ones(1, CONTEXT, dtype=torch.long).index_fill(1, torch.tensor([0, 1]), 0)
    cases: dict[str, Callable[[], Any]] = {
        "a StaticCache": lambda: model.generate(prompt(), past_key_values=StaticCache(model.config, 80), **GREEDY),
        "a model without a cache, with a press": lambda: model.generate(prompt(), use_cache=False, **GREEDY),
        "a padded batch with a press": lambda: model.generate(prompt(), attention_mask=padded, **GREEDY),
        "continuous batching with a press": lambda: model.generate_batch([prompt()[0].tolist()]),
        "a press within a press": lambda: press(model).__enter__(),
    }
    for expected, run in cases.items():
        with press(model), pytest.raises(GacError, match=expected):
            run()


def test_plans_of_other_models(press: Any) -> None:
    for family, changed in (
        ("llama", {"num_hidden_layers": 3}),
        ("llama", {"num_key_value_heads": 4}),
        ("mistral", {"sliding_window": 32}),
    ):
        other = small_model(small_config(family, **changed))
        with pytest.raises(PlanError, match=r"of 2 layers with .* key-value heads of"), press(other):
            pass


def test_latents_are_refused(small: Small) -> None:
    model = small_model(small_config("llama"))
    options: dict[str, Any] = {"tokenizer": small.tokenizer, "progress": False}
    plan = gac.allocate(model, 1.0, forms=("latent",), kv_cache=0.5, calibration=f"{small.text}:2x16", **options)
    compressed = gac.compress(model, plan, **options)
    press = gac.press(planned(small, small_model(small_config("llama"))))
    with pytest.raises(ModelError, match="a model that caches latents, with a press"), press(compressed):
        pass


DRAWN = torch.rand(1, generator=torch.Generator().manual_seed(7))
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "phi3": {"sliding_window": None},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_press(small: Small, family: str) -> None:
    model = small_model(small_config(family, **FAMILIES[family]))
    options = {"calibration": f"{small.text}:1x144", "step": 16, "shares": (0.5,)}
    for name in known_presses():
        if name == "observedattention":
            with pytest.raises(GacError, match="attn_implementation='eager'"):
                planned(small, model, name, **options)
            continue
        plan = planned(small, model, name, **options)
        ids = prompt().repeat(1, 2)
        torch.manual_seed(7)
        tokens = [by_hand(model, gac.press(plan), ids, 2) for _ in range(2)]
        assert torch.equal(*tokens), name
        assert torch.equal(torch.rand(1), DRAWN), name  # presses leave the caller's random numbers alone
