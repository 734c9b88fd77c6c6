"""A tiny random model with a tokenizer and text, and a home of its own for what is measured of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gac.measurement.documents import Documents


def tiny_config() -> LlamaConfig:
    """Llama with 2 layers, hidden 64, 176 neurons, 4 heads and 2 KV heads of 16, and a vocabulary of 258."""
    return LlamaConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
        tie_word_embeddings=False,
    )


def tiny_model() -> LlamaForCausalLM:
    """A fresh random model, the same every time, in float32 on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(tiny_config())
    model.eval()  # type: ignore[no-untyped-call]
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte; ``<s>`` (256) comes first unless special tokens are off."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)  # type: ignore[no-untyped-call]


def tiny_text() -> Documents:
    """Two windows of 64 tokens to calibrate the tiny model on."""
    return Documents(["Ranks fall off where the curvature of a weight is small. " * 4], windows=2, length=64)


@contextmanager
def temporary_home() -> Iterator[None]:
    """Nothing that is measured inside is kept; ``GAC_HOME`` is as before on exit."""
    with TemporaryDirectory(prefix="gac-testing-") as folder, patch.dict(os.environ, GAC_HOME=folder):
        yield
