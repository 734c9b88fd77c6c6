"""Packaged texts that need no network: news, and Python's reference."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from gac.core.errors import TextError
from gac.measurement import samples
from gac.measurement.text import calibration_windows, evaluation_windows
from tests.measurement.ordinals import Ordinals


@pytest.mark.parametrize("name", ["wiki-sample", "news-sample"])
def test_packaged_texts_say_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(TextError, match=rf"{name} is not installed.*Run pip install --no-deps gensim==4.4.0"):
        evaluation_windows(name, Ordinals())


def test_news_is_read_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "gensim" / "test" / "test_data"
    data.mkdir(parents=True)
    (data / "lee_background.cor").write_text("Rain fell.\nIt was wet.\n", encoding="utf-8")
    (tmp_path / "gensim" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert samples.news_sample() == "Rain fell.\nIt was wet.\n"


def test_the_reference_has_each_paragraph_once_and_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = ModuleType("pydoc_data.topics")
    vars(topics)["topics"] = {"while": "A loop.\n\nShared.", "for": "Shared.\n\nAnother loop."}
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", topics)
    assert samples.python_reference() == "Shared.\n\nAnother loop.\n\nA loop."
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(TextError, match=r"python-reference is missing; expected a Python with pydoc_data\.topics"):
        samples.python_reference()


def test_the_reference_is_calibrated_on_at_its_head_alone() -> None:
    calibrated = calibration_windows("python-reference:32x1024", Ordinals())
    evaluated = evaluation_windows("python-reference", Ordinals(), length=1000, most=5)
    assert evaluated.start == calibrated.ids.numel() == 32 * 1024
    assert (len(evaluated), evaluated.complete) == (5, False)
    assert evaluated.digest == evaluation_windows("python-reference", Ordinals(), 5, 1000).digest
    text = samples.python_reference()
    assert "".join(map(chr, calibrated.ids.flatten().tolist())) == text[: 32 * 1024]
    assert "".join(map(chr, evaluated.ids[0].tolist())) == text[32 * 1024 :][:1000]
    paragraphs = text.split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs)


def test_at_most_so_many_windows_are_all_where_there_are_fewer(text_file: Path, prose: str) -> None:
    some = evaluation_windows(str(text_file), Ordinals(), length=100, most=10**6)
    assert some.complete
    assert len(some) == len(prose) // 100
