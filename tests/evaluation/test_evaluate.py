"""Several models measured alike."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import gac
from gac.core.errors import CheckpointError, GacError, ModelError, TextError
from gac.evaluation import evaluate
from tests.small_pipeline import Small


def test_a_loaded_model_and_a_directory_give_the_same(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: Any, directory: Path, prose: str
) -> None:
    found = gac.evaluate([tiny_model, directory], text=prose, windows=2, length=32, tokenizer=tiny_tokenizer)
    one, other = found.models
    assert one.perplexity == other.perplexity == gac.perplexity(tiny_model, tiny_tokenizer, prose, windows=2, length=32)
    assert (other.name, other.dtype) == (str(directory), "float32")
    assert other.parameters == sum(parameter.numel() for parameter in tiny_model.parameters())


def test_the_dense_model_is_measured_once(directory: Path, prose: str) -> None:
    found = gac.evaluate([directory, str(directory)], against=directory, text=prose, windows=2, length=32)
    assert found.against is not None
    assert [found.log_ratio(model) for model in found.models] == [0.0, 0.0]
    assert [model.divergence.kl for model in found.models if model.divergence] == [0.0, 0.0]


def test_several_texts_are_measured_alike(directory: Path, prose: str) -> None:
    how: dict[str, Any] = {"against": directory, "windows": 2, "length": 32}
    other = "0123 + 456 = 579; " * 20
    both = gac.evaluate(directory, text=prose, also=[[other]], **how)
    [model] = both.models
    for at, text in enumerate((prose, [other])):
        alone = gac.evaluate(directory, text=text, **how)
        assert model.texts[at].perplexity == alone.models[0].perplexity
        assert model.texts[at].divergence == alone.models[0].divergence
        assert both.against is not None
        assert both.against.texts[at].perplexity == model.texts[at].perplexity
        assert both.log_ratio(model, at) == 0
    without = gac.evaluate(directory, text=prose, also=[[other]], kl=False, **how)
    assert [one.perplexity for one in without.models[0].texts] == [one.perplexity for one in model.texts]


def test_without_divergence_the_same_perplexities(directory: Path, prose: str) -> None:
    how: dict[str, Any] = {"against": directory, "text": prose, "windows": 2, "length": 32}
    one, other = (gac.evaluate(directory, kl=kl, **how) for kl in (True, False))
    assert other.models[0].divergence is None
    assert (one.models[0].perplexity, one.against) == (other.models[0].perplexity, other.against)


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
    with pytest.raises(ModelError) as caught:
        gac.evaluate([directory, tmp_path / "none"], text=prose)
    assert str(caught.value) == (
        f"model '{tmp_path / 'none'}': no such directory; expected a directory with a config.json, a hub id like "
        "org/name, or a packaged model (smollm2, gemma3-270m). Check the path."
    )


@pytest.mark.parametrize(
    ("models", "text", "message"),
    [
        ([], "wiki-sample", "no model; expected at least one. Name a model."),
        (["m"], None, "no text and no tasks; expected something to measure. Name a text, or tasks."),
    ],
)
def test_nothing_to_measure(models: list[str], text: str | None, message: str) -> None:
    with pytest.raises(GacError) as caught:
        gac.evaluate(models, text=text)
    assert str(caught.value) == message
