"""A text beside the calibration text: what is measured, when it warns, and what is refused."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from gac.core.errors import ModelError, TextError
from gac.measurement.documents import Documents, Text
from gac.measurement.runs import window_loss
from gac.measurement.similarity import FAR, compare_texts, moment_ratio
from gac.measurement.texts import Texts
from gac.models.families import family_of


@pytest.fixture
def compare(tiny_model: LlamaForCausalLM, tiny_tokenizer: Any, prose: str) -> Any:
    def found(check: Text, calibration: str | list[str] | Documents | None = None, **cut: Any) -> float:
        texts = Texts.of(Documents([prose[:2000]], 8, 64) if calibration is None else calibration)
        sites = family_of(tiny_model.config).sites(tiny_model.config)
        windows = texts.cut(tiny_tokenizer, **cut)
        return compare_texts(tiny_model, tiny_tokenizer, sites, texts, windows, check, False)

    return found


def test_the_same_is_alike_and_other_letters_are_far(compare: Any, prose: str, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "gac")
    assert compare([prose[4000:9000]]) == pytest.approx(1, abs=0.25)
    assert "(16 and 8 windows)" in caplog.text
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert compare(["0123456789+-*/<>{}[]()#@!~ " * 100]) > 2 * FAR
    assert [record.levelname for record in caplog.records[1:]] == ["INFO", "WARNING"]
    assert "1 document given in memory is unlike the calibration text (" in caplog.text


def test_losses_are_the_dense_models(compare: Any, tiny_model: Any, tiny_tokenizer: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "gac")
    compare(["z y x " * 20])
    ids = tiny_tokenizer("z y x " * 20)["input_ids"][:64]
    with torch.no_grad():
        loss = float(window_loss(tiny_model, torch.tensor(ids))) / 63
    assert f"(1 and 8 windows): the dense model's loss is {loss:.3f} and " in caplog.text


def test_a_moment_is_1_beside_itself_and_grows_with_what_the_half_lacks() -> None:
    half = torch.diag(torch.tensor([1.0, 1.0, 1e-4]))
    assert moment_ratio(half, half, half) == pytest.approx(1)
    assert moment_ratio(half, 2 * half, half) == pytest.approx(2)
    assert moment_ratio(half, torch.eye(3), half) > 1000


def test_what_cannot_be_compared(compare: Any, tiny_model: LlamaForCausalLM, prose: str, text_file: Path) -> None:
    copy = text_file.with_name("copy.txt")
    copy.write_text(text_file.read_text(), encoding="utf-8")
    for check, seed in ((text_file, 0), (copy, 1)):
        with pytest.raises(TextError, match=f"the check text {check}, which is calibrated on"):
            compare(str(check), f"{text_file}:4x64", seed=seed)
    with pytest.raises(TextError, match="a check beside 1 calibration window; expected at least 2"):
        compare(["another text " * 20], f"{text_file}:1x64")
    with pytest.raises(TextError, match="has 5 tokens for evaluation"):
        compare(["short"])
    with pytest.raises(TextError, match=r"text 'nots\.txt' is neither known nor a file"):
        compare("nots.txt")
    with torch.no_grad():
        tiny_model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ModelError, match="the loss of a window of 1 document given in memory is nan"):
        compare([prose[4000:9000]])
