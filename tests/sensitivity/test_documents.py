"""Documents that are given in memory: how they are packed, and what is refused."""

import hashlib
from typing import Any

import pytest

from gac.errors import TextError
from gac.sensitivity.documents import Documents
from gac.sensitivity.text import calibration_windows
from tests.sensitivity.ordinals import Ordinals


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


@pytest.mark.parametrize(("texts", "given"), [([], "no document"), ("abc", "a str"), (["abc", 3], "a int")])
def test_what_is_no_iterable_of_documents(texts: Any, given: str) -> None:
    with pytest.raises(TextError) as caught:
        Documents(texts)
    assert str(caught.value) == f"{given}; expected an iterable of strings, each a document. Pass a list of documents."
