"""Calibration and evaluation text: named sources, files, several texts, documents in memory, and Wikipedia's dump."""

import bz2
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import numpy as np
import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gac.core.errors import TextError
from gac.evaluation.perplexity import take_sample
from gac.healing.text import split_texts as healing_texts
from gac.measurement import text as module
from gac.measurement import wikipedia
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
    windows_of,
)
from gac.measurement.texts import Part, Texts, interleaved
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


class Quiet(Ordinals):
    """It has a BOS, and does not put it first, like SmolLM2's."""

    def __call__(self, text: str, *, add_special_tokens: bool, **_: Any) -> dict[str, list[int]]:
        return super().__call__(text, add_special_tokens=False)


def test_bos_is_where_the_tokenizer_puts_it_or_where_it_is_asked_for(text_file: Path) -> None:
    cases = (Ordinals(0), None), (Ordinals(0), False), (Ordinals(None), None)
    assert [bos_of(*case) for case in cases] == [0, None, None]
    plain, unheaded, headed = (
        calibration_windows(f"{text_file}:3x10", tokenizer, bos=bos)
        for tokenizer, bos in ((Ordinals(), None), (Quiet(0), None), (Quiet(0), True))
    )
    assert (plain.digest, plain.bos) == (unheaded.digest, unheaded.bos)
    assert (headed.bos, headed.ids[:, 0].tolist()) == ("windows", [0, 0, 0])
    with pytest.raises(TextError, match="bos=True with a Ordinals without BOS"):
        evaluation_windows(str(text_file), Ordinals(), bos=True)


def even_steps(text: str, length: int, windows: int | None) -> list[list[int]]:
    """The whole windows of a text, or so many of them."""
    whole = [list(map(ord, text[at : at + length])) for at in range(0, len(text) - length + 1, length)]
    count = windows or len(whole)
    return [whole[at * len(whole) // count] for at in range(count)]


# Neither NUL nor lone surrogates, which are refused, nor white space, of which alone no text is made.
_TEXTS = st.text(st.characters(exclude_categories=["Cc", "Cs", "Z"]), min_size=1, max_size=200)


@settings(max_examples=60)
@given(text=_TEXTS, length=st.integers(2, 20), windows=st.none() | st.integers(1, 20), bos=st.sampled_from([None, 0]))
def test_windows_do_not_overlap(text: str, length: int, windows: int | None, bos: int | None) -> None:
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


def test_a_seed_draws_windows_from_the_whole_text(text_file: Path, prose: str) -> None:
    spec = TextSpec(str(text_file), 5, 100)
    first, second = (calibration_windows(spec, Ordinals(), seed=seed) for seed in (1, 2))
    assert first.digest == calibration_windows(spec, Ordinals(), seed=1).digest
    assert len({first.digest, second.digest, calibration_windows(spec, Ordinals()).digest}) == 3
    starts = [prose.index("".join(map(chr, row))) for row in first.ids.tolist()]
    assert starts == sorted(set(starts))
    assert all(start % 100 == 0 for start in starts)


def test_named_text_is_split_and_an_unknown_name_lists_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known = "wiki-sample, news-sample, python-reference, wikitext2, c4, chat, code"
    with pytest.raises(TextError, match=rf"expected one of {known}, .*Did you mean 'wikitext2'"):
        evaluation_windows("wikitext-2", Ordinals())
    assert ", ".join(text_names()) == known
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


def test_files_with_a_byte_order_mark_and_files_that_are_not_utf8(tmp_path: Path) -> None:
    for name, content in (("marked", "abcdefgh".encode("utf-8-sig")), ("plain", b"abcdefgh")):
        (tmp_path / name).write_bytes(content)
    marked, plain = (evaluation_windows(str(tmp_path / name), Ordinals(), 1, 4) for name in ("marked", "plain"))
    assert marked.digest == plain.digest
    path = tmp_path / os.fsdecode(b"na\xffme.txt")
    path.write_text("some text", encoding="utf-8")
    with pytest.raises(TextError, match=r"the name of text .*na\\udcffme.* Rename the file"):
        check_text(str(path))
    for content, message in (("déjà vu".encode("latin-1"), "codec"), ("text".encode("utf-16-le"), "has NUL at")):
        (tmp_path / "other.txt").write_bytes(content)
        with pytest.raises(TextError, match=rf"text file .*other.txt .*{message}"):
            evaluation_windows(str(tmp_path / "other.txt"), Ordinals(), 1, 4)


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
    ("name", "rows", "asked"),
    [
        (
            "chat",
            [{"messages": [{"content": "one"}, {"content": "two"}]}],
            [("HuggingFaceH4/ultrachat_200k", "train_sft"), ("HuggingFaceH4/ultrachat_200k", "test_sft")],
        ),
        (
            "code",
            [{"content": "one"}, {"content": "two"}],
            [("codeparrot/codeparrot-clean-train", "train"), ("codeparrot/codeparrot-clean-valid", "train")],
        ),
    ],
)
def test_chat_and_code_come_from_the_hub(
    name: str, rows: list[Any], asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []

    def load_dataset(dataset: str, *, split: str, streaming: bool) -> list[Any]:
        assert streaming
        loaded.append((dataset, split))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for windows in (
        calibration_windows(f"{name}:2x4", Ordinals(), bos=False),
        evaluation_windows(name, Ordinals(), 2, 4, False),
    ):
        assert "".join(map(chr, windows.ids.flatten().tolist())) == "one\n\ntwo"
    assert loaded == asked
    assert window_length(name) == 1024


def test_c4_is_read_no_further_than_needed_and_may_be_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def load_dataset(dataset: str, **_: Any) -> Any:
        for index in range(10_000):
            read.append(index)
            yield {"text": "x"}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert evaluation_windows("c4", Ordinals(0), length=1).ids.numel() == 1 + 2000 + 2 * 1999
    assert len(read) == 2000
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=ConnectionError("Couldn't reach 'Salesforce'")))
    with pytest.raises(TextError, match=r"data set Salesforce/wikitext \(test\) cannot be fetched: Couldn't reach"):
        evaluation_windows("wikitext2", Ordinals())


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two files of 400 letters, of other letters each."""
    for name, first in (("a.txt", "a"), ("b.txt", "n")):
        (tmp_path / name).write_text("".join(chr(ord(first) + at % 13) for at in range(400)), encoding="utf-8")
    return [str(tmp_path / name) for name in ("a.txt", "b.txt")]


def test_texts_are_one_or_a_list_or_documents(files: list[str]) -> None:
    assert Texts.of("c4:2x8").parts == (TextSpec("c4", 2, 8),)
    assert Texts.of(Path("notes.txt")).parts == (TextSpec("notes.txt"),)  # type: ignore[arg-type]
    assert Texts.of(TextSpec("c4", 2, 8)) == Texts.of("c4:2x8")
    assert Texts.of(Documents(["abc"], 2, 8)).parts == (Documents(["abc"], 2, 8),)
    one = Texts.of([f"{files[0]}:3x8"])
    assert (one.name, one.written) == (files[0], f"{files[0]}:3x8")
    assert one.cut(Ordinals()).digest == calibration_windows(f"{files[0]}:3x8", Ordinals()).digest
    alone = [["abc"], ["a:0x5"], ["see\nc4:2x8"]]
    for documents in (*alone, ["abc", "the ratio:2x8"], ["wiki-sample", "c4"], ["no-such.txt:3x8", "no-other.txt:2x8"]):
        assert Texts.of(documents).parts == (Documents(documents),)
        assert Texts.of(iter(documents)).parts == (Documents(documents),)
    memory = Documents(["abc"], 1, 8)
    found = Texts.of([f"{files[0]}:3x8", TextSpec(files[1], 2, 8), memory])
    assert found.parts == (TextSpec(files[0], 3, 8), TextSpec(files[1], 2, 8), memory)
    assert (found.windows, found.length, found.documents) == (6, 8, memory.digests)
    assert found.name == f"{files[0]} (3) and {files[1]} (2) and 1 document given in memory (1)"
    assert found.written == (f"{files[0]}:3x8", f"{files[1]}:2x8", "1 document given in memory")


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["nots.txt:3x8"], "text 'nots.txt' is neither known nor a file"),
        (["a document " * 20], "Pass documents as gac.Documents"),
        (["c4:3x9"], "calibration windows of 8 and 9 tokens"),
        (["c4:2.5x8"], "2.5 windows of 8 tokens of c4"),
        (["c4:3x8", "c4:2x8"], "the calibration text c4 twice"),
        ([3], "a int among calibration texts"),
    ],
)
def test_what_is_no_list_of_texts(files: list[str], others: list[Any], message: str) -> None:
    with pytest.raises(TextError, match=message):
        Texts.of([f"{files[0]}:3x8", *others])


def test_text_that_the_model_writes_is_sampled_beside_the_others_and_is_no_text_to_evaluate_on(
    files: list[str],
) -> None:
    texts, asked = Texts.of([f"{files[0]}:3x8", "self:2x8"]), list[tuple[int, int]]()

    def sample(part: Part) -> Windows | None:
        if part.name != "self":
            return None
        asked.append((part.windows, part.length))
        return windows_of("self", torch.full((part.windows * part.length,), 7), Ordinals(), part.windows, part.length)

    found = texts.cut(Ordinals(), special=sample)
    assert asked == [(2, 8)]
    assert (found.ids == 7).all(dim=1).tolist().count(True) == 2
    assert found.ids.shape == (5, 8)
    message = "text 'self', which the dense model writes; expected text that others wrote"
    for refused in (
        lambda: texts.cut(Ordinals()),
        lambda: evaluation_windows("self", Ordinals()),
        lambda: check_text("self"),
    ):
        with pytest.raises(TextError, match=message):
            refused()


def test_windows_are_those_of_the_texts_in_their_order(files: list[str]) -> None:
    texts = Texts.of([f"{files[0]}:20x8", f"{files[1]}:10x8"])
    found = texts.cut(Ordinals())
    assert found.ids.shape == (30, 8)
    assert found.digest == texts.cut(Ordinals()).digest != texts.cut(Ordinals(), seed=1).digest
    for file, rows in ((files[0], found.ids[:, 0] < ord("n")), (files[1], found.ids[:, 0] >= ord("n"))):
        own = calibration_windows(f"{file}:{int(rows.sum())}x8", Ordinals())
        assert found.ids[rows].tolist() == own.ids.tolist()
    headed = texts.cut(Ordinals(0))
    assert (headed.bos, set(headed.ids[:, 0].tolist())) == ("windows", {0})


@settings(max_examples=40)
@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_every_split_has_the_texts_in_their_shares(counts: list[int]) -> None:
    order = interleaved(counts)
    assert [order.count(part) for part in range(len(counts))] == counts
    for step in range(2, 9):
        for first in range(step):
            split = order[first::step]
            for part, count in enumerate(counts):
                assert abs(split.count(part) - count / sum(counts) * len(split)) < 4
    for step in (2, 4, 8):  # equal texts do not alternate
        assert interleaved([32, 32])[::step].count(0) == pytest.approx(32 / step, abs=1)


def read(documents: Documents) -> list[str]:
    """The windows as text."""
    return ["".join(map(chr, window)) for window in calibration_windows(documents, Ordinals()).ids.tolist()]


def test_documents_are_joined_and_cut_into_windows_and_have_names_and_digests() -> None:
    assert read(Documents(["abc", "defg"], windows=2, length=4)) == ["abc\n", "\ndef"]
    assert read(Documents(["abc", "defg"], windows=2, length=4, separator="|")) == ["abc|", "defg"]
    documents = Documents(letter * 3 for letter in "ab")
    assert (documents.texts, documents.windows, documents.length) == (("aaa", "bbb"), 64, 1024)
    first, second = (calibration_windows(Documents(texts, 1, 3), Ordinals()) for texts in (["abc", "d"], ["abd", "d"]))
    assert first.name == "2 documents given in memory"
    assert first.digest != second.digest
    assert Documents(["abc", "d"]).digests == tuple(hashlib.sha256(text).hexdigest()[:16] for text in (b"abc", b"d"))


TEXT = "a text "
SURROGATE = r"has the lone surrogate '\\ud83d' at character 2; .*Replace half characters"
REFUSED: dict[str, tuple[Any, str]] = {
    "none": ([], "no document"),
    "a string": (TEXT, "a str as documents"),
    "a dict of columns": ({"text": [TEXT], "id": [1]}, r"a dict of columns \('text', 'id'\).*documents\['text'\]"),
    "a table": (pandas.DataFrame({"text": [TEXT]}), r"a DataFrame of columns \('text'\)"),
    "a set": ({TEXT}, "a set of documents, whose order changes from run to run"),
    "rows": ([{"text": TEXT}], r"document 0 of type dict; .*row\['text'\]"),
    "lists": ([TEXT, [TEXT]], "document 1 of type list; .*flat list"),
    "a number": ([TEXT, 3], "document 1 of type int"),
    "blank": (["", " \n"], "2 documents given in memory, all of them blank"),
    "a lone surrogate": ([TEXT, "b \ud83d"], "document 1 " + SURROGATE),
    "NUL": (["t\0e\0x\0t"], "document 0 has NUL at character 1; .*UTF-16"),
}
PLACES: dict[str, Callable[[Any], object]] = {
    "calibration": Texts.of,
    "evaluation": lambda given: take_sample(Ordinals(), given, 1, 2),
    "healing": lambda given: healing_texts(given, length=2),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_documents(case: str) -> None:
    documents, expected = REFUSED[case]
    with pytest.raises(TextError, match=expected):
        Documents(documents)
    with pytest.raises(TextError, match="the separator " + SURROGATE):
        Documents([TEXT], separator="\n \ud83d")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", ["a table", "lists", "NUL"])
def test_they_are_refused_wherever_documents_are_read(case: str, place: str) -> None:
    documents, expected = REFUSED[case]
    with pytest.raises(TextError, match=expected):
        PLACES[place](documents)


def test_a_column_of_a_data_set() -> None:
    rows = datasets.Dataset.from_dict({"text": ["abc", "", "d"], "id": [1, 2, 3]})
    for column in (rows["text"], rows[:3]["text"], np.array(["abc", "", "d"]), dict.fromkeys(["abc", "", "d"]).keys()):
        assert Documents(column).texts == ("abc", "", "d")
    for table in (rows, rows[:2], datasets.DatasetDict({"train": rows})):
        with pytest.raises(TextError, match=r"as documents|document 0 of type dict"):
            Documents(table)


DUMP = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.8/">
  <page><title>Rank</title><ns>0</ns><revision><text>
{{Infobox|rank=8}} '''Rank''' is a ''[[number (mathematics)|number]]''.&lt;ref&gt;A book.&lt;/ref&gt;
[[File:Rank.png|thumb|A [[picture]]]]
== History ==


{| class="table"
| cell
|}
* It's [http://example.org old] &amp;amp; ''known&lt;ref name="x"/&gt;.
See [[Matrix]] and [[2001: A Space Odyssey]].&lt;!-- not this --&gt;
[[Category:Numbers]] [[de:Rang]]
  </text></revision></page>
  <page><title>Old</title><ns>0</ns><redirect title="Rank" /><revision><text>#REDIRECT [[Rank]]</text></revision></page>
  <page><title>Talk:Rank</title><ns>1</ns><revision><text>No article.</text></revision></page>
  <page><title>Width</title><ns>0</ns><revision><text>A width.</text></revision></page>
</mediawiki>"""

STRIPPED = """Rank is a number.

History

* It's old & known.
See Matrix and 2001: A Space Odyssey.

A width."""


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "dump.bz2"
    path.write_bytes(bz2.compress(DUMP.encode()))
    monkeypatch.setattr(wikipedia, "packaged_file", lambda *_: path)
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "home"))
    return path


def test_markup_is_stripped_to_what_is_read_and_kept(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wikipedia.wiki_sample() == STRIPPED.replace("* ", "")
    first = wikipedia.wiki_sample()
    monkeypatch.setattr(wikipedia, "_articles", lambda _: pytest.fail("stripped again"))
    assert wikipedia.wiki_sample() == first
    assert [path.suffix for path in (dump.parent / "home" / "text").iterdir()] == [".txt"]


def test_a_cache_that_cannot_be_written_costs_no_more_than_time(dump: Path, caplog: pytest.LogCaptureFixture) -> None:
    (dump.parent / "home").write_text("in the way")
    assert wikipedia.wiki_sample().startswith("Rank is a number.")
    assert "the stripped text could not be kept" in caplog.text
