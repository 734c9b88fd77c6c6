"""A small compressed model with all forms in it, and a tokenizer whose text tells every token."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from gac.plan.plan import Plan
from tests.compression.compressed import compressed
from tests.compression.stored import stored
from tests.models.small import small_config, small_model, weights_of

LAYERS, TOKENS = 5, 16


@dataclass(frozen=True)
class Wordy:
    """A model, and what it says by itself."""

    model: Any
    tokenizer: PreTrainedTokenizerFast

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def says(self, prompt: str, tokens: int = TOKENS) -> str:
        """What ``generate`` says, greedily."""
        given = self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = self.model.generate(**given, max_new_tokens=tokens, do_sample=False)
        text: str = self.tokenizer.decode(output[0, given.input_ids.shape[1] :], skip_special_tokens=True)
        return text

    def parted(self, prompt: str, answer: str) -> float:
        """How far its own word lies above another answer's where they part, in standard deviations of its logits."""
        own, other = self.says(prompt).split(), answer.split()
        at = next((at for at, (one, two) in enumerate(zip(own, other, strict=True)) if one != two), None)
        if at is None:
            return 0.0
        before = self.tokenizer(" ".join([prompt, *own[:at]]), return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            logits = self.model(**before).logits[0, -1].float()
        words = self.tokenizer.convert_tokens_to_ids([own[at], other[at]])
        return float((logits[words[0]] - logits[words[1]]) / logits.std())


def prompts() -> list[str]:
    """Twenty, of 4 to 23 tokens."""
    draw = random.Random(0)
    return [" ".join(f"w{draw.randrange(256)}" for _ in range(4 + at)) for at in range(20)]


def wordy(model_type: str, make_plan: Callable[..., Plan]) -> Wordy:
    """One of an architecture whose projections are called as Llama's or Phi-3's; heads of 32."""
    config = small_config(model_type, hidden_size=128, num_hidden_layers=LAYERS)
    return Wordy(compressed(small_model(config), make_plan, _changes(config)), _tokenizer())


def wordy_stored(schemes: Sequence[str], make_plan: Callable[..., Plan], dtype: torch.dtype) -> Wordy:
    """A Llama with dense weights and pairs of few bits, the schemes in turn, so that several read the same input."""
    config = small_config("llama", hidden_size=128, num_hidden_layers=LAYERS)
    config.intermediate_size, config.dtype = 192, dtype
    chosen = {}
    for at, weight in enumerate(weights_of(config)):
        pair = int(weight.name.split(".")[2]) == 3 or at % 11 == 5
        form = ("low_rank", 32) if pair else ("dense", min(weight.out_features, weight.in_features))
        chosen[weight.name] = (*form, schemes[at % len(schemes)])
    return Wordy(stored(small_model(config), make_plan, chosen), _tokenizer())


def _changes(config: Any) -> dict[str, tuple[str, int]]:
    """A dense layer, one with some weights factored, one narrower, one with others factored, one with all."""
    some = ("q_proj", "gate_proj", "gate_up_proj")
    found: dict[str, tuple[str, int]] = {}
    for weight in weights_of(config):
        layer, last = int(weight.name.split(".")[2]), weight.name.rpartition(".")[2]
        if layer == 2 and (weight.neurons or weight.values):
            found[weight.name] = ("narrow", 96) if weight.neurons else ("head_dim", 8)
        elif layer in (1, 3) and (last in some) == (layer == 1):
            found[weight.name] = ("low_rank", 16)
        elif layer == 4:
            found[weight.name] = ("latent:1", 8) if weight.cached and weight.heads else ("low_rank", 24)
    return found


def _tokenizer() -> PreTrainedTokenizerFast:
    """A token a word; ``<s>`` comes first."""
    words = [*(f"w{at}" for at in range(256)), "<s>", "</s>"]
    backend = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
