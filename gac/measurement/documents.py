"""Calibration and evaluation text given as in-memory documents, packed one after the other."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gac.core.arguments import Count, check_fields
from gac.core.errors import TextError

DEFAULT_WINDOWS = 64
DEFAULT_LENGTH = 1024
_NOT_TEXT = re.compile("[\x00\ud800-\udfff]")
_EXPECTED = "an iterable of strings, each a document"
_MEND = "Replace half characters: text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')."
_REMEDY = "Give one flat list of texts: decode bytes, take row['text'] of a row, leave out what is no text."


@dataclass(frozen=True)
class Documents:
    """Documents as calibration text, and how they are packed.

    They are joined by the separator, tokenised as one text without special tokens, and cut into windows from the
    start; a window may span documents, and what is left at the end is dropped.

    Attributes:
        texts: the documents; any iterable of strings is read to its end (cut a stream with ``itertools.islice``).
        windows: how many windows to calibrate on.
        length: tokens of a window.
        separator: what stands between two documents; the tokenizer's ``eos_token`` is another choice.

    Raises:
        TextError: there are none, all are blank, one is not a string or has characters that are not text (the error has
            its index), they have no order or are columns of a table, or a number is below 1.
    """

    texts: Iterable[str]
    windows: Count = DEFAULT_WINDOWS
    length: Count = DEFAULT_LENGTH
    separator: str = "\n\n"

    def __post_init__(self) -> None:
        texts = ordered(self.texts)
        if not texts:
            raise TextError("no document", _EXPECTED, "Pass a list of documents.")
        object.__setattr__(self, "texts", texts)
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise TextError(f"document {index} of type {type(text).__name__}", _EXPECTED, _REMEDY)
            check_characters(text, f"document {index}")
        check_fields(self, TextError)
        check_characters(self.separator, "the separator")
        if not any(map(str.strip, texts)):
            raise TextError(f"{self.name}, all of them blank", "text", "Pass documents that have text.")

    @classmethod
    def of(cls, documents: "Documents | Iterable[str]") -> "Documents":
        return documents if isinstance(documents, Documents) else cls(documents)

    @property
    def name(self) -> str:
        count = len(tuple(self.texts))
        return f"{count:,} document{'s' if count > 1 else ''} given in memory"

    @property
    def text(self) -> str:
        return self.separator.join(self.texts)

    @property
    def digests(self) -> tuple[str, ...]:
        """Of each document the first 16 hexadecimal digits of its SHA-256."""
        return tuple(hashlib.sha256(text.encode()).hexdigest()[:16] for text in self.texts)


def ordered(documents: object) -> tuple[Any, ...]:
    """Read an iterable of documents to its end; TextError for strings, mappings, tables and sets (without order)."""
    kind = f"a {type(documents).__name__}"
    if isinstance(documents, Mapping) or hasattr(documents, "columns"):
        names: Any = getattr(documents, "columns", documents)
        columns = ", ".join(map(repr, islice(names, 3)))
        remedy = "Give the column that has the text, such as documents['text']."
        raise TextError(f"{kind} of columns ({columns}) as documents", _EXPECTED, remedy)
    if isinstance(documents, (set, frozenset)):
        problem = f"{kind} of documents, whose order changes from run to run"
        raise TextError(problem, "documents in an order", "Give a list: sorted(documents).")
    if not isinstance(documents, Iterable) or isinstance(documents, (str, bytes)):
        raise TextError(f"{kind} as documents", _EXPECTED, "Pass a list of documents.")
    return tuple(documents)


def check_characters(text: str, name: str, remedy: str | None = None) -> None:
    """Refuse NUL and lone surrogates, which no tokenizer and no file in UTF-8 takes; ``name`` is for the error."""
    if wrong := _NOT_TEXT.search(text):
        character, mend = f"the lone surrogate {wrong[0]!a}", _MEND
        if wrong[0] == "\0":
            character, mend = "NUL", "Read it in its own encoding, which may be UTF-16."
        raise TextError(f"{name} has {character} at character {wrong.start()}", "text in Unicode", remedy or mend)


Text = str | Documents | Iterable[str]
"""Text as a caller may pass it: a name, a path, or documents."""
