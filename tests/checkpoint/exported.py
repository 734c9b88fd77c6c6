"""Small models and a tokenizer that can be exported: as GGUF, as DeciLM, for other engines."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.compression.compressed import MakePlan
from tests.compression.stored import stored
from tests.models.small import small_config, small_model, weights_of

EXACT = ("w8a16", "w4a16:32", "w3a16:64", "w2a16:32")
"""Schemes that a GGUF file holds bit for bit."""
NEURONS = 192


def words(split: Any = None, **changed: Any) -> PreTrainedTokenizerFast:
    """One token a byte but one, one pair of letters, and special tokens: as many as the small models have."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:-1]
    vocab = {**{byte: index for index, byte in enumerate(alphabet)}, "th": 255}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h")], **changed))
    backend.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template="{{ messages }}", **special)


def uniform(
    model_type: str, make_plan: MakePlan, schemes: tuple[str, ...], neurons: int = NEURONS, **changed: Any
) -> Any:
    """A small model whose weights are in these schemes in turn."""
    config = small_config(model_type, **changed)
    config.intermediate_size = neurons
    config.dtype = changed.get("dtype", torch.float32)
    dims = {weight.name: min(weight.out_features, weight.in_features) for weight in weights_of(config)}
    chosen = {name: ("dense", dims[name], schemes[number % len(schemes)]) for number, name in enumerate(dims)}
    return stored(small_model(config), make_plan, chosen)
