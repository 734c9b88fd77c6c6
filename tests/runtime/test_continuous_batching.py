"""Continuous batching of transformers: the tokens of ``generate``, or a refusal where its paged cache does not fit."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from gac.core.errors import ModelError
from tests.compression.compressed import MakePlan, compressed
from tests.models.small import small_config, small_model

ATTENTION = "model.layers.1.self_attn"
PROMPTS = [[7, 3, 9, 4, 8], [11, 5]]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
REFUSED = {
    "head_dim": ({f"{ATTENTION}.{name}_proj": ("head_dim", 8) for name in "vo"}, "v_proj writes 2 heads of 8 numbers"),
    "heads": ({f"{ATTENTION}.{name}_proj": ("heads", 1) for name in "qkvo"}, "k_proj writes 1 heads of 32 numbers"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_layers_of_other_sizes_are_refused(form: str, make_plan: MakePlan) -> None:
    changes, numbers = REFUSED[form]
    model = compressed(small_model(small_config("llama")), make_plan, changes)
    with pytest.raises(ModelError, match=f"{ATTENTION}.{numbers}; expected 2 of 32 in every layer"):
        model.generate_batch(PROMPTS)


def test_pairs_give_the_tokens_of_generate(make_plan: MakePlan) -> None:
    batching = pytest.importorskip("transformers.generation.configuration_utils").ContinuousBatchingConfig(
        num_blocks=8, max_batch_tokens=64, block_size=32
    )
    pairs = {f"{ATTENTION}.{name}_proj": ("low_rank", 8) for name in "qkvo"}
    model = compressed(small_model(small_config("llama")), make_plan, pairs)
    options: Any = GenerationConfig
    found = model.generate_batch(
        PROMPTS,
        generation_config=options(**GREEDY, eos_token_id=-1),
        continuous_batching_config=batching,
        progress_bar=False,
    )
    alone = []
    for prompt in PROMPTS:
        ids: Tensor = model.generate(torch.tensor([prompt]), eos_token_id=None, **GREEDY)
        alone.append(ids[0, len(prompt) :].tolist())
    assert [request.generated_tokens for request in found.values()] == alone
