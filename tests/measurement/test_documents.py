"""Documents that are given in memory: how they are packed, and what is refused."""

import hashlib
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pandas
import pytest

from gac.core.errors import TextError
from gac.evaluation.perplexity import take_sample
from gac.healing.text import split_texts as healing_texts
from gac.measurement.documents import Documents
from gac.measurement.text import calibration_windows
from gac.measurement.texts import Texts
from tests.measurement.ordinals import Ordinals


def read(documents: Documents) -> list[str]:
    """The windows as text."""
    return ["".join(map(chr, window)) for window in calibration_windows(documents, Ordinals()).ids.tolist()]


def test_documents_are_joined_and_cut_into_windows() -> None:
    assert read(Documents(["abc", "defg"], windows=2, length=4)) == ["abc\n", "\ndef"]
    assert read(Documents(["abc", "defg"], windows=2, length=4, separator="|")) == ["abc|", "defg"]


def test_any_iterable_is_read_once() -> None:
    documents = Documents(letter * 3 for letter in "ab")
    assert documents.texts == ("aaa", "bbb")
    assert (documents.windows, documents.length) == (64, 1024)


def test_windows_are_named_and_their_digest_is_that_of_the_text() -> None:
    one, other = (calibration_windows(Documents(texts, 1, 3), Ordinals()) for texts in (["abc", "d"], ["abd", "d"]))
    assert one.name == "2 documents given in memory"
    assert Documents(["abc"]).name == "1 document given in memory"
    assert one.digest != other.digest


def test_each_document_has_a_digest() -> None:
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
    "encoded": ([b"text"], "document 0 of type bytes; .*decode bytes"),
    "a generator with a number": ((text for text in (TEXT, 3)), "document 1 of type int"),
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


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", ["a table", "lists", "NUL"])
def test_they_are_refused_wherever_documents_are_read(case: str, place: str) -> None:
    documents, expected = REFUSED[case]
    with pytest.raises(TextError, match=expected):
        PLACES[place](documents)


def test_a_separator_is_text() -> None:
    with pytest.raises(TextError, match="the separator " + SURROGATE):
        Documents([TEXT], separator="\n \ud83d")


def test_a_column_of_a_data_set() -> None:
    rows = datasets.Dataset.from_dict({"text": ["abc", "", "d"], "id": [1, 2, 3]})
    for column in (rows["text"], rows[:3]["text"], np.array(["abc", "", "d"]), dict.fromkeys(["abc", "", "d"]).keys()):
        assert Documents(column).texts == ("abc", "", "d")
    for table in (rows, rows[:2], datasets.DatasetDict({"train": rows})):
        with pytest.raises(TextError, match=r"as documents|document 0 of type dict"):
            Documents(table)
