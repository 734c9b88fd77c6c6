"""Several calibration texts: what a list means, and how their windows are interleaved."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gac.core.errors import TextError
from gac.measurement.documents import Documents
from gac.measurement.text import TextSpec, calibration_windows
from gac.measurement.texts import Texts, interleaved
from tests.measurement.ordinals import Ordinals


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two files of 400 letters, of other letters each."""
    for name, first in (("a.txt", "a"), ("b.txt", "n")):
        (tmp_path / name).write_text("".join(chr(ord(first) + at % 13) for at in range(400)), encoding="utf-8")
    return [str(tmp_path / name) for name in ("a.txt", "b.txt")]


def test_one_text_is_itself(files: list[str]) -> None:
    assert Texts.of("c4:2x8").parts == (TextSpec("c4", 2, 8),)
    assert Texts.of(Path("notes.txt")).parts == (TextSpec("notes.txt"),)  # type: ignore[arg-type]
    assert Texts.of(TextSpec("c4", 2, 8)) == Texts.of("c4:2x8")
    assert Texts.of(Documents(["abc"], 2, 8)).parts == (Documents(["abc"], 2, 8),)
    one = Texts.of([f"{files[0]}:3x8"])
    assert (one.name, one.written) == (files[0], f"{files[0]}:3x8")
    assert one.cut(Ordinals()).digest == calibration_windows(f"{files[0]}:3x8", Ordinals()).digest


@pytest.mark.parametrize(
    "documents",
    [
        ["abc"],
        ["abc", "the ratio:2x8"],
        ["wiki-sample", "c4"],
        ["no-such.txt:3x8", "no-other.txt:2x8"],
        ["a:0x5"],
        ["see\nc4:2x8"],
    ],
)
def test_strings_that_are_no_known_text_with_a_size_are_documents(documents: list[str]) -> None:
    assert Texts.of(documents).parts == (Documents(documents),)
    assert Texts.of(iter(documents)).parts == (Documents(documents),)


def test_a_list_of_texts(files: list[str]) -> None:
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


def test_equal_texts_do_not_alternate() -> None:
    for step in (2, 4, 8):
        assert interleaved([32, 32])[::step].count(0) == pytest.approx(32 / step, abs=1)
