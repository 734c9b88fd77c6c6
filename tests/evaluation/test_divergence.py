import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gac.errors import ModelError
from gac.evaluation.perplexity import compare_models, divergence, perplexity
from gac.evaluation.protocol import take_sample
from gac.evaluation.results import Divergence


@pytest.fixture
def other_model(tiny_config: LlamaConfig) -> LlamaForCausalLM:
    """The tiny model with other random weights."""
    torch.manual_seed(1)
    return LlamaForCausalLM(tiny_config).eval()


def test_a_model_does_not_diverge_from_itself(tiny_model: LlamaForCausalLM, tiny_tokenizer: Any, prose: str) -> None:
    found = divergence(tiny_model, copy.deepcopy(tiny_model), tiny_tokenizer, prose, windows=2, length=32)
    assert (found.kl, found.top1, found.tokens) == (0.0, 1.0, 62)


# Batches of 1 to 3 windows; windows so long that they are compared in parts.
@pytest.mark.parametrize(("batch", "windows", "length"), [(1, 3, 32), (2, 3, 32), (3, 3, 32), (1, 1, 1300)])
def test_it_is_the_mean_over_the_tokens(
    batch: int, windows: int, length: int, tiny_config: LlamaConfig, tiny_tokenizer: Any, prose: str
) -> None:
    tiny_config.max_position_embeddings = 2048
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(LlamaForCausalLM(tiny_config).eval())
    found = divergence(*models, tiny_tokenizer, prose, windows=windows, length=length, batch=batch)
    ids = torch.tensor(tiny_tokenizer(prose, add_special_tokens=False)["input_ids"])[: windows * length]
    with torch.no_grad():
        shaped = ids.reshape(windows, length)
        log_q, log_p = (model(input_ids=shaped).logits[:, :-1].double().log_softmax(-1) for model in models)
    assert found.kl == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), rel=1e-4)
    assert found.top1 == pytest.approx(float((log_p.argmax(-1) == log_q.argmax(-1)).double().mean()))


def test_both_perplexities_come_out_of_the_same_pass(
    tiny_model: LlamaForCausalLM, other_model: LlamaForCausalLM, tiny_tokenizer: Any, prose: str
) -> None:
    sample = take_sample(tiny_tokenizer, prose, 2, 32)
    own, reference, _ = compare_models(tiny_model, other_model, sample)
    assert own == perplexity(tiny_model, tiny_tokenizer, prose, windows=2, length=32)
    assert reference == perplexity(other_model, tiny_tokenizer, prose, windows=2, length=32)


def test_it_reads_as_a_sentence() -> None:
    protocol = "wikitext2, 141 windows x 2048 from token 0, non-overlapping, no BOS"
    assert str(Divergence(0.2468, 0.8125, 288627, protocol, "bfloat16", "float32")) == (
        "KL 0.2468 nats, top-1 81.2% (wikitext2, 141 windows x 2048 from token 0, non-overlapping, no BOS; "
        "288,627 tokens, bfloat16 against float32)"
    )


def test_models_of_other_tokens_are_refused(
    tiny_model: LlamaForCausalLM, tiny_config: LlamaConfig, tiny_tokenizer: Any, prose: str
) -> None:
    tiny_config = copy.deepcopy(tiny_config)
    tiny_config.vocab_size = 300
    with pytest.raises(ModelError) as caught:
        divergence(tiny_model, LlamaForCausalLM(tiny_config), tiny_tokenizer, prose, windows=1, length=16)
    assert str(caught.value) == (
        "a model of 258 tokens beside one of 300; expected two models of one vocabulary. "
        "Compare a compressed model with the one it was made of."
    )


def test_a_reference_that_is_not_finite_is_named_by_its_window(
    tiny_model: LlamaForCausalLM, other_model: LlamaForCausalLM, tiny_tokenizer: Any
) -> None:
    rare = tiny_tokenizer("z", add_special_tokens=False)["input_ids"][0]
    with torch.no_grad():
        other_model.model.embed_tokens.weight[rare] = float("nan")
    with pytest.raises(ModelError, match="the loss of window 3 is nan; expected a finite loss"):
        divergence(tiny_model, other_model, tiny_tokenizer, "a b c d e f z h ", length=4, batch=3)
