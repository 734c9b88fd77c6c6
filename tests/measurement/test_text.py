import hashlib
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gac.core.errors import TextError
from gac.measurement import text as module
from gac.measurement.documents import Documents
from gac.measurement.text import (
    TextSpec,
    Windows,
    bos_of,
    calibration_windows,
    check_text,
    check_vocabulary,
    evaluation_windows,
    text_names,
    window_length,
)
from tests.measurement.ordinals import Ordinals


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("wiki-sample", TextSpec("wiki-sample", 64, 1024)),
        ("wiki-sample:16x512", TextSpec("wiki-sample", 16, 512)),
        ("C:\\text.txt", TextSpec("C:\\text.txt", 64, 1024)),
        ("a:b.txt:2x3", TextSpec("a:b.txt", 2, 3)),
    ],
)
def test_a_spec_may_carry_a_size(text: str, spec: TextSpec) -> None:
    assert TextSpec.parse(text) == TextSpec.parse(str(spec)) == spec


@pytest.mark.parametrize("size", ["0x512", "3x0", "-3x512", "2.5x10", "+3x8", "1e3x8", "9999999999x8"])
def test_a_size_that_is_no_whole_number_above_0_is_refused(size: str) -> None:
    with pytest.raises(TextError, match=r"c4.*(a positive size|or a path)"):
        check_text(TextSpec.parse(f"c4:{size}").name)


def test_a_file_is_cut_in_even_steps(text_file: Path, prose: str) -> None:
    windows = calibration_windows(f"{text_file}:3x10", Ordinals())
    assert windows.name == str(text_file)
    assert windows.ids.dtype == torch.int64
    starts = [10 * (at * (len(prose) // 10) // 3) for at in range(3)]
    assert starts[0] == 0
    assert starts[2] > len(prose) // 2
    assert windows.ids.tolist() == [[ord(character) for character in prose[start : start + 10]] for start in starts]
    assert windows.digest == hashlib.sha256(windows.ids.numpy().tobytes()).hexdigest()


def test_no_special_tokens_are_added_but_bos(tiny_tokenizer: Any, text_file: Path, prose: str) -> None:
    windows = evaluation_windows(str(text_file), tiny_tokenizer, length=50, bos=False)
    assert tiny_tokenizer.decode(windows.ids[:2].flatten()) == prose[:100]
    windows = evaluation_windows(str(text_file), tiny_tokenizer, length=51)
    assert set(windows.ids[:, 0].tolist()) == {tiny_tokenizer.bos_token_id}
    assert tiny_tokenizer.decode(windows.ids[:2, 1:].flatten()) == prose[:100]


@pytest.mark.parametrize(("tokenizer", "bos", "head"), [(0, None, 0), (0, False, None), (None, None, None)])
def test_bos_is_where_the_tokenizer_puts_it(tokenizer: int | None, bos: bool | None, head: int | None) -> None:
    assert bos_of(Ordinals(tokenizer), bos) == head


class Quiet(Ordinals):
    """It has a BOS, and does not put it first, like SmolLM2's."""

    def __call__(self, text: str, *, add_special_tokens: bool, **_: Any) -> dict[str, list[int]]:
        return super().__call__(text, add_special_tokens=False)


def test_a_bos_that_the_tokenizer_does_not_put_first_is_there_where_it_is_asked_for(text_file: Path) -> None:
    plain, unheaded, headed = (
        calibration_windows(f"{text_file}:3x10", tokenizer, bos=bos)
        for tokenizer, bos in ((Ordinals(), None), (Quiet(0), None), (Quiet(0), True))
    )
    assert (plain.digest, plain.bos) == (unheaded.digest, unheaded.bos)
    assert headed.digest != plain.digest
    assert (headed.bos, headed.ids[:, 0].tolist()) == ("windows", [0, 0, 0])


def test_a_bos_that_there_is_none_of_is_refused(text_file: Path) -> None:
    for read in (calibration_windows, evaluation_windows):
        with pytest.raises(TextError, match="bos=True with a Ordinals without BOS"):
            read(str(text_file), Ordinals(), bos=True)  # type: ignore[operator]


def even_steps(text: str, length: int, windows: int | None) -> list[list[int]]:
    """The whole windows of a text, or so many of them."""
    whole = [list(map(ord, text[at : at + length])) for at in range(0, len(text) - length + 1, length)]
    count = windows or len(whole)
    return [whole[at * len(whole) // count] for at in range(count)]


# Neither NUL nor lone surrogates, which are refused, nor white space, of which alone no text is made.
_TEXTS = st.text(st.characters(exclude_categories=["Cc", "Cs", "Z"]), min_size=1, max_size=200)


@settings(max_examples=60)
@given(text=_TEXTS, length=st.integers(2, 20), windows=st.none() | st.integers(1, 20), bos=st.sampled_from([None, 0]))
def test_windows_are_the_text_in_order_without_overlap(
    text: str, length: int, windows: int | None, bos: int | None
) -> None:
    step = length if bos is None else length - 1
    available, document = len(text) // step, Documents([text])
    if available < (windows or 1):
        headed = "" if bos is None else " with BOS"
        expected = f"has {len(text)} tokens for evaluation; expected at least {(windows or 1) * step}, for .*{headed}"
        with pytest.raises(TextError, match=expected):
            evaluation_windows(document, Ordinals(bos), windows, length)
        return
    cut = evaluation_windows(document, Ordinals(bos), windows, length)
    assert cut.ids.shape == (windows or available, length)
    assert cut.ids[:, length - step :].tolist() == even_steps(text, step, windows)
    assert bos is None or set(cut.ids[:, 0].tolist()) == {bos}
    assert cut.complete == (len(cut) == available)


def test_a_text_that_is_too_short_says_what_would_do() -> None:
    for windows, length, remedy in (
        (3, 4, "Ask for at most 2 windows of 4"),
        (1, 9, "Ask for windows of at most 8 tokens"),
    ):
        with pytest.raises(TextError, match=remedy):
            evaluation_windows(Documents(["abcdefg"]), Ordinals(0), windows, length)
    assert evaluation_windows(Documents(["abcdefg"]), Ordinals(0), 1, 8).ids.shape == (1, 8)


def test_a_seed_draws_windows_from_the_whole_text(text_file: Path, prose: str) -> None:
    spec = TextSpec(str(text_file), 5, 100)
    first, second = (calibration_windows(spec, Ordinals(), seed=seed) for seed in (1, 2))
    assert first.digest == calibration_windows(spec, Ordinals(), seed=1).digest
    assert len({first.digest, second.digest, calibration_windows(spec, Ordinals()).digest}) == 3
    starts = [prose.index("".join(map(chr, row))) for row in first.ids.tolist()]
    assert starts == sorted(set(starts))
    assert all(start % 100 == 0 for start in starts)


def test_named_text_is_split_between_calibration_and_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    source = module._Source(lambda: "abcdefghij", lambda: "abcdefghij", reserved=6)
    monkeypatch.setattr(module, "_SOURCES", {"letters": source})
    evaluated = evaluation_windows("letters", Ordinals(), length=2)
    assert "".join(map(chr, evaluated.ids.flatten().tolist())) == "ghij"
    assert evaluated.start == 6
    for seed in range(5):
        calibrated = calibration_windows("letters:2x3", Ordinals(), seed)
        assert "".join(map(chr, calibrated.ids.flatten().tolist())) == "abcdef"
    with pytest.raises(TextError, match="letters has 6 tokens for calibration; expected at least 8"):
        calibration_windows("letters:4x2", Ordinals())


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(TextError, match=r"expected one of wiki-sample, wikitext2, c4, .*Did you mean 'wikitext2'"):
        evaluation_windows("wikitext-2", Ordinals())
    assert text_names() == ("wiki-sample", "wikitext2", "c4")


def test_a_file_whose_name_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"na\xffme.txt")
    path.write_text("some text", encoding="utf-8")
    with pytest.raises(TextError, match=r"the name of text .*na\\udcffme.* Rename the file"):
        check_text(str(path))


def test_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    for name, encoding in (("marked.txt", "utf-8-sig"), ("plain.txt", "utf-8")):
        (tmp_path / name).write_text("abcdefgh", encoding=encoding)
    marked, plain = (evaluation_windows(str(tmp_path / f"{one}.txt"), Ordinals(), 1, 4) for one in ("marked", "plain"))
    assert marked.digest == plain.digest


@pytest.mark.parametrize(
    ("content", "expected"),
    [("déjà vu".encode("latin-1"), "codec"), ("text".encode("utf-16-le"), "has NUL at character 1")],
)
def test_a_file_in_another_encoding(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "other.txt"
    path.write_bytes(content)
    with pytest.raises(TextError, match=rf"text file {path} .*{expected}"):
        evaluation_windows(str(path), Ordinals(), 1, 4)


def test_ids_outside_the_vocabulary_are_refused(tiny_model: Any) -> None:
    vocabulary = tiny_model.config.vocab_size
    windows = Windows("text", torch.tensor([[1, vocabulary - 1]]), "")
    check_vocabulary(windows, tiny_model)
    windows.ids[0, 1] += 1
    with pytest.raises(TextError, match=f"token id {vocabulary} on text; expected ids below .* {vocabulary}"):
        check_vocabulary(windows, tiny_model)
    with pytest.raises(TextError, match="on text, its BOS; expected ids below"):
        check_vocabulary(Windows("text", torch.tensor([[vocabulary, 8]]), "", bos="windows"), tiny_model)


@pytest.mark.parametrize(("name", "evaluated"), [("wikitext2", "test"), ("c4", "validation")])
def test_data_sets_give_other_splits_to_evaluation(name: str, evaluated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(dataset: str, *, split: str, **_: Any) -> list[dict[str, str]]:
        asked.append(split)
        return [{"text": "one"}, {"text": "two"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    texts = [
        calibration_windows(f"{name}:2x5", Ordinals(0)),
        *(evaluation_windows(name, Ordinals(0), 2, 4, bos) for bos in (None, True, False)),
    ]
    assert ["".join(map(chr, windows.ids.flatten().tolist())) for windows in texts] == [
        "\0one\n\0\ntwo",
        "\0one\n\ntw",
        "\0one\0\n\nt",
        "one\n\ntwo",
    ]
    assert [windows.bos for windows in texts] == ["windows", "text", "windows", "none"]
    assert asked == ["train", *[evaluated] * 3]


@pytest.mark.parametrize(
    ("name", "length"), [("wikitext2", 2048), ("c4", 2048), ("wiki-sample", 1024), ("a.txt", 1024)]
)
def test_a_text_has_windows_of_its_own_length(name: str, length: int) -> None:
    assert window_length(name) == length


def test_a_tokenizer_without_bos_adds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"text": "one two"}])
    assert evaluation_windows("wikitext2", Ordinals(), length=4).bos == "none"


def test_c4_is_read_no_further_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def load_dataset(dataset: str, **_: Any) -> Any:
        for index in range(10_000):
            read.append(index)
            yield {"text": "x"}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert evaluation_windows("c4", Ordinals(0), length=1).ids.numel() == 1 + 2000 + 2 * 1999
    assert len(read) == 2000


def test_a_data_set_out_of_reach_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'Salesforce/wikitext' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(TextError, match=r"data set Salesforce/wikitext \(test\) cannot be fetched: Couldn't reach"):
        evaluation_windows("wikitext2", Ordinals())
