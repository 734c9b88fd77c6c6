"""Perplexity and divergence by one protocol, and several models measured alike."""

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gac
from gac.core.errors import CheckpointError, GacError, ModelError, TextError
from gac.evaluation import evaluate
from gac.evaluation.perplexity import compare_models, divergence, perplexity, take_sample
from gac.measurement import text as text_module
from gac.measurement.samples import SAMPLE_TEXTS
from gac.models.loading import load_tokenizer
from tests.small_pipeline import Small


@pytest.fixture
def long(tiny_config: LlamaConfig) -> Any:
    """Models of 2,048 positions, by their seed."""

    def make(seed: int) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        tiny_config.max_position_embeddings = 2048
        return LlamaForCausalLM(tiny_config).eval()

    return make


def headed(tokenizer: Any, text: str, windows: int, length: int) -> torch.Tensor:
    """Windows of BOS and ``length - 1`` tokens of text, in even steps."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    full = ids.unfold(0, length - 1, length - 1)
    taken = full[[i * len(full) // windows for i in range(windows)]]
    return torch.nn.functional.pad(taken, (1, 0), value=tokenizer.bos_token_id)


@pytest.mark.parametrize(("windows", "length"), [(4, 32), (1, 1300)])  # long windows are summed in parts
def test_perplexity_is_the_mean(windows: int, length: int, long: Any, tiny_tokenizer: Any, prose: str) -> None:
    tiny_model = long(0)
    measured = perplexity(tiny_model, tiny_tokenizer, prose, windows=windows, length=length)
    ids = headed(tiny_tokenizer, prose, windows, length)
    with torch.no_grad():
        loss = tiny_model(input_ids=ids, labels=ids).loss
    assert measured.value == pytest.approx(math.exp(loss), rel=1e-5)
    assert measured.tokens == windows * (length - 1)


def test_protocol_and_batches(tiny_model: LlamaForCausalLM, tiny_tokenizer: Any, prose: str, text_file: Path) -> None:
    single, many = (perplexity(tiny_model, tiny_tokenizer, prose, windows=5, length=32, batch=size) for size in (1, 3))
    assert many.value == pytest.approx(single.value, rel=1e-6)
    assert (many.tokens, many.protocol) == (single.tokens, single.protocol)
    measured = perplexity(tiny_model.bfloat16(), tiny_tokenizer, str(text_file), windows=2, length=16)
    protocol = f"{text_file}, 2 windows x 16 in even steps from token 0, non-overlapping"
    assert measured.protocol == f"{protocol}, BOS at the head of every window"
    assert measured.dtype == "bfloat16"
    without = perplexity(tiny_model, tiny_tokenizer, str(text_file), windows=2, length=16, bos=False)
    assert without.protocol == f"{protocol}, no BOS"
    assert without.value != measured.value
    assert without.tokens == measured.tokens == 30


def test_every_module_gets_its_own_mode_back(tiny_model: LlamaForCausalLM, tiny_tokenizer: Any, prose: str) -> None:
    tiny_model.train()
    tiny_model.model.layers[0].eval()
    before = [module.training for module in tiny_model.modules()]
    perplexity(tiny_model, tiny_tokenizer, prose, windows=1, length=16)
    assert [module.training for module in tiny_model.modules()] == before


def test_what_has_no_perplexity(tiny_model: LlamaForCausalLM, tiny_tokenizer: Any, prose: str) -> None:
    with pytest.raises(TextError, match="windows of 1 tokens; expected at least 2: the first is not predicted"):
        perplexity(tiny_model, tiny_tokenizer, prose, length=1)
    with pytest.raises(ModelError, match="windows of 1,024 tokens for a model of 512 positions"):
        perplexity(tiny_model, tiny_tokenizer, prose)
    rare = tiny_tokenizer("z", add_special_tokens=False)["input_ids"][0]
    with torch.no_grad():
        tiny_model.model.embed_tokens.weight[rare] = float("nan")
    with pytest.raises(ModelError, match="the loss of window 3 is nan"):
        perplexity(tiny_model, tiny_tokenizer, "a b c d e f z h ", length=5, batch=3)
    torch.nn.init.zeros_(tiny_model.lm_head.weight)
    tiny_model.lm_head.bias = torch.nn.Parameter(torch.zeros(258))
    with torch.no_grad():
        tiny_model.lm_head.bias[0] = 1000.0
    with pytest.raises(ModelError, match="a mean loss of 1000 nats a token; expected a finite perplexity"):
        perplexity(tiny_model, tiny_tokenizer, "a b c d e f", length=4)


def test_published_perplexities_have_a_bos_first(long: Any, tiny_tokenizer: Any, prose: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"text": prose}, {"text": prose}])
    model = long(0)
    measured = perplexity(model, tiny_tokenizer, "wikitext2", windows=2)
    full = tiny_tokenizer(f"{prose}\n\n{prose}", return_tensors="pt")["input_ids"][0].unfold(0, 2048, 2048)
    ids = full[[0, len(full) // 2]]
    with torch.no_grad():
        losses = [model(input_ids=row[None], labels=row[None]).loss.double() for row in ids]
    assert measured.value == pytest.approx(math.exp(sum(losses) / 2), rel=1e-5)
    protocol = "wikitext2, 2 windows x 2048 in even steps from token 0, non-overlapping, BOS at the head of"
    assert measured.protocol == f"{protocol} the text"
    every = perplexity(model, tiny_tokenizer, "wikitext2", windows=2, bos=True)
    assert every.protocol == f"{protocol} every window"


def test_another_models_tokenizer_is_refused(tiny_config: LlamaConfig, tiny_tokenizer: Any, prose: str) -> None:
    tiny_config.vocab_size = 40
    tiny_config.bos_token_id = tiny_config.eos_token_id = tiny_config.pad_token_id = 1
    with pytest.raises(TextError, match=r"expected ids below the model's vocabulary of 40\."):
        perplexity(LlamaForCausalLM(tiny_config), tiny_tokenizer, prose, length=16)


# A batch that does not divide the windows; a window so long that it is compared in parts.
@pytest.mark.parametrize(("batch", "windows", "length"), [(2, 3, 32), (1, 1, 1300)])
def test_divergence_is_the_mean(batch: int, windows: int, length: int, long: Any, tiny_tokenizer: Any, prose: str):
    models = [long(0), long(1)]
    result = divergence(*models, tiny_tokenizer, prose, windows=windows, length=length, batch=batch)
    shaped = headed(tiny_tokenizer, prose, windows, length)
    with torch.no_grad():
        log_q, log_p = (model(input_ids=shaped).logits[:, :-1].double().log_softmax(-1) for model in models)
    assert result.kl == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), rel=1e-4)
    assert result.top1 == pytest.approx(float((log_p.argmax(-1) == log_q.argmax(-1)).double().mean()))


def test_both_perplexities_come_out_of_the_same_pass(long: Any, tiny_tokenizer: Any, prose: str) -> None:
    tiny_model, other_model = long(0), long(1)
    sample = take_sample(tiny_tokenizer, prose, 2, 32)
    ours, reference, _ = compare_models(tiny_model, other_model, sample)
    assert ours == perplexity(tiny_model, tiny_tokenizer, prose, windows=2, length=32)
    assert reference == perplexity(other_model, tiny_tokenizer, prose, windows=2, length=32)


def test_models_of_other_tokens_are_refused(tiny_model: Any, tiny_config: Any, tiny_tokenizer: Any, prose: str) -> None:
    tiny_config.vocab_size = 300
    with pytest.raises(ModelError, match="models of 258 and 300 tokens"):
        divergence(tiny_model, LlamaForCausalLM(tiny_config), tiny_tokenizer, prose, windows=1, length=16)
    wide = copy.deepcopy(tiny_model)
    wide.lm_head = torch.nn.Linear(wide.config.hidden_size, 264, bias=False)  # its config says 258
    with pytest.raises(ModelError, match="models of 264 and 258 tokens"):
        divergence(wide, tiny_model, tiny_tokenizer, prose, windows=1, length=16)


def test_a_model_is_its_directory(tiny_model: Any, tiny_tokenizer: Any, directory: Path, prose: str) -> None:
    evaluation = gac.evaluate([tiny_model, directory], text=prose, windows=2, length=32, tokenizer=tiny_tokenizer)
    loaded, saved = evaluation.models
    expected = gac.perplexity(tiny_model, tiny_tokenizer, prose, windows=2, length=32)
    assert loaded.perplexity == saved.perplexity == expected
    assert (saved.name, saved.dtype) == (str(directory), "float32")
    assert saved.parameters == sum(parameter.numel() for parameter in tiny_model.parameters())


def test_several_texts_are_measured_alike(directory: Path, prose: str) -> None:
    how: dict[str, Any] = {"against": directory, "windows": 2, "length": 32}
    other = "0123 + 456 = 579; " * 20
    both = gac.evaluate(directory, text=prose, also=[[other]], **how)
    [model] = both.models
    for number, text in enumerate((prose, [other])):
        alone = gac.evaluate(directory, text=text, **how)
        assert model.texts[number].perplexity == alone.models[0].perplexity
        assert model.texts[number].divergence == alone.models[0].divergence
        assert both.against is not None
        assert both.against.texts[number].perplexity == model.texts[number].perplexity
        assert both.log_ratio(model, number) == 0
    without = gac.evaluate([directory, str(directory)], text=prose, also=[[other]], kl=False, **how)
    assert [text.perplexity for text in without.models[1].texts] == [text.perplexity for text in model.texts]
    assert (without.models[0].divergence, without.against) == (None, both.against)


@pytest.fixture
def three_texts(prose: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Short texts of 20, 60 and 100 windows of 32 tokens under the names of the packaged ones."""
    lengths = dict(zip(SAMPLE_TEXTS, (20, 60, 100), strict=True))
    texts = {name: (20 * prose)[: 31 * windows] for name, windows in lengths.items()}
    sources = {name: text_module._Source(partial(str, text), partial(str, text)) for name, text in texts.items()}
    monkeypatch.setattr(text_module, "_SOURCES", sources)
    return texts


def test_three_texts_are_measured_by_default(directory: Path, three_texts: dict[str, str]) -> None:
    how: dict[str, Any] = {"length": 32, "kl": False}
    by_default = gac.evaluate(directory, against=directory, **how)
    measured = [text.perplexity for text in by_default.models[0].texts]
    assert [(each.text, each.tokens // 31) for each in measured] == list(zip(SAMPLE_TEXTS, (20, 32, 32), strict=True))
    assert by_default.mean_ratios == (1,)
    assert len({each.digest for each in measured}) == 3
    every = gac.evaluate(directory, windows="all", **how).models[0]
    assert [each.perplexity.tokens // 31 for each in every.texts] == [20, 60, 100]
    two = gac.evaluate(directory, windows=2, also="news-sample", **how).models[0]
    assert [each.perplexity.tokens // 31 for each in two.texts] == [2, 2, 2, 2]
    named = gac.evaluate(directory, text="news-sample", **how).models[0]
    assert named.texts == every.texts[1:2]


def test_the_mean_is_of_all_texts(directory: Path, three_texts: dict[str, str], tiny_config: LlamaConfig) -> None:
    other = LlamaForCausalLM(tiny_config).eval()
    tokenizer = load_tokenizer(str(directory))
    result = gac.evaluate(other, against=directory, windows=2, length=32, kl=False, tokenizer=tokenizer)
    ratios = [result.log_ratio(result.models[0], text) for text in range(3)]
    assert result.mean_log_ratio(result.models[0]) == pytest.approx(sum(ratios) / 3)
    assert result.mean_ratios == (pytest.approx(math.exp(sum(ratios) / 3)),)


def test_a_text_that_is_too_short_is_refused_at_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gac.evaluation.evaluate.open_model", None)
    with pytest.raises(TextError, match="1 document given in memory has 9 tokens for evaluation"):
        gac.evaluate(directory, text="too short")


def test_a_plan_that_cannot_be_read_is_refused_at_once(small: Small, prose: str, monkeypatch: Any) -> None:
    model: Any = small.compress(small.allocate(0.7))
    del vars(model)["_gac_plan"]
    model.gac_files = {"plan.json": "{}"}
    monkeypatch.delattr(evaluate, "perplexity_on")
    with pytest.raises(CheckpointError, match=r"plan\.json"):
        gac.evaluate(model, text=prose, windows=2, length=32, tokenizer=small.tokenizer)


def test_nothing_to_measure(directory: Path, tmp_path: Path, prose: str) -> None:
    for models, text, problem in (
        ([], "wiki-sample", "no model"),
        (["m"], None, "no text and no tasks"),
        ([directory, tmp_path / "none"], prose, "none': no such directory"),
    ):
        with pytest.raises(GacError, match=problem):
            gac.evaluate(models, text=text)
