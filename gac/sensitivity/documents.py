"""Text that is at hand instead of having a name: documents, packed one after the other."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from gac.arguments import Count, check_fields
from gac.errors import TextError

DEFAULT_WINDOWS = 64
DEFAULT_LENGTH = 1024


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
        TextError: there are none, one is no string, or a number is below 1.
    """

    texts: Iterable[str]
    windows: Count = DEFAULT_WINDOWS
    length: Count = DEFAULT_LENGTH
    separator: str = "\n\n"

    def __post_init__(self) -> None:
        several = isinstance(self.texts, Iterable) and not isinstance(self.texts, str)
        texts = tuple(self.texts) if several else ()
        wrong = next((text for text in texts if not isinstance(text, str)), None) if several else self.texts
        if not texts or wrong is not None:
            given = "no document" if wrong is None else f"a {type(wrong).__name__}"
            raise TextError(given, "an iterable of strings, each a document", "Pass a list of documents.")
        object.__setattr__(self, "texts", texts)
        check_fields(self, TextError)

    @classmethod
    def of(cls, given: "Documents | Iterable[str]") -> "Documents":
        """An iterable of strings, packed in the default way; documents as they are."""
        return given if isinstance(given, Documents) else cls(given)

    @property
    def name(self) -> str:
        """What plans and reports call them."""
        count = len(tuple(self.texts))
        return f"{count:,} document{'s' if count > 1 else ''} given in memory"

    @property
    def text(self) -> str:
        """The one text that is cut into windows."""
        return self.separator.join(self.texts)

    @property
    def digests(self) -> tuple[str, ...]:
        """For each document the first 16 hexadecimal digits of its SHA-256."""
        return tuple(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16] for text in self.texts)


Text = str | Documents | Iterable[str]
"""What a caller may call text: a name or a path, or documents."""
