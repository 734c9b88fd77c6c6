"""Several models measured alike."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import gac
from gac.core.errors import CheckpointError, GacError, ModelError, TextError
from gac.evaluation import evaluate
from tests.small_pipeline import Small


def test_a_loaded_model_and_its_directory_give_the_same(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: Any, directory: Path, prose: str
) -> None:
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


def test_a_text_that_is_too_short_is_refused_before_a_model_is_loaded(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("gac.evaluation.evaluate.open_model", refuse)
    with pytest.raises(TextError, match="1 document given in memory has 9 tokens for evaluation"):
        gac.evaluate(directory, text="too short")


def test_a_plan_that_cannot_be_read_is_refused_before_anything_is_measured(
    small: Small, prose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = small.compress(small.allocate(0.7))
    del vars(model)["_gac_plan"]
    model.gac_files = {"plan.json": "{}"}
    monkeypatch.delattr(evaluate, "perplexity_on")
    with pytest.raises(CheckpointError, match=r"plan\.json"):
        gac.evaluate(model, text=prose, windows=2, length=32, tokenizer=small.tokenizer)


def test_a_model_that_is_not_there_is_named_first(directory: Path, tmp_path: Path, prose: str) -> None:
    with pytest.raises(ModelError, match="none': no such directory"):
        gac.evaluate([directory, tmp_path / "none"], text=prose)


@pytest.mark.parametrize(
    ("models", "text", "problem"), [([], "wiki-sample", "no model"), (["m"], None, "no text and no tasks")]
)
def test_nothing_to_measure(models: list[str], text: str | None, problem: str) -> None:
    with pytest.raises(GacError, match=problem):
        gac.evaluate(models, text=text)
