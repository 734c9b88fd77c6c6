"""A profile's lines as records: thousands at a time, or one by one, which says what is wrong with one.

Python's share of a line is what a million of them cost. So lines are decoded together, by types that are derived from
those of the slow reader; where anything about them is strange they are read again one by one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property, reduce
from operator import or_
from typing import Any, Protocol, get_args, get_type_hints

import numpy as np

from gac.arrays import Ints
from gac.errors import ProfileError
from gac.io import suspicion
from gac.profiling.records import AgainLine, KernelLine, Line, RowLine, SentinelLine

_CHUNK_BYTES = 2**19
_LONGEST_LINE = 2**20

ROW, AGAIN, SENTINEL, KERNEL, OTHER = range(5)
"""What a line may be."""

_KINDS = {RowLine: ROW, AgainLine: AGAIN, SentinelLine: SENTINEL, KernelLine: KERNEL}
_OPTIONAL = frozenset({"error"})


class Readable(Protocol):
    """What bytes come from, up to ``size`` at a time; none at the end."""

    def read(self, size: int, /) -> bytes: ...


class WrongError(Exception):
    """Something is wrong with these lines; reading them one by one says what."""


@dataclass(frozen=True)
class Lines:
    """Some lines of a profile, decoded.

    Attributes:
        text: the lines, without the last newline.
        records: what each says, with the fields of its class in ``gac.profiling.records``; launches are not decoded.
        kinds: ``ROW``, ``AGAIN``, ``SENTINEL``, ``KERNEL`` or ``OTHER`` for each, int64.
        alone: those that are only decoded as yet, and have to be read by ``read_line`` too: all but timings and rows
            that have a number.
    """

    text: bytes
    records: list[Any]
    kinds: Ints
    alone: tuple[int, ...]

    @classmethod
    def of(cls, text: bytes, records: list[Any]) -> "Lines":
        kinds = np.fromiter(map(_decoder()[1].__getitem__, map(type, records)), np.int64, len(records))
        alone = kinds >= KERNEL
        rows, places = _select(records, kinds, ROW)
        alone[places] = [row.error is not None for row in rows]
        return cls(text, records, kinds, tuple(np.flatnonzero(alone).tolist()))

    def __getitem__(self, place: int) -> bytes:
        return self._split[place]

    @cached_property
    def _split(self) -> list[bytes]:
        return self.text.split(b"\n")

    def select(self, kind: int) -> tuple[list[Any], Ints]:
        """The records of a kind, and which lines they are."""
        return _select(self.records, self.kinds, kind)

    @property
    def have_each_key_once(self) -> bool:
        """Every key is followed by a colon. False too where a string has one: those of rows and timings have none."""
        failed = [self.records[place] for place in self.alone if self.kinds[place] == ROW]
        keys = _row_keys(self.select(ROW)[0]) - _row_keys(failed)
        for kind in (AGAIN, SENTINEL):
            keys += _keys(AgainLine) * int((self.kinds == kind).sum())
        colons = np.count_nonzero(np.frombuffer(self.text, dtype=np.uint8) == ord(":"))
        return bool(keys == colons - sum(self[place].count(b":") for place in self.alone))


def _select(records: list[Any], kinds: Ints, kind: int) -> tuple[list[Any], Ints]:
    places = np.flatnonzero(kinds == kind)
    if len(places) == len(records):
        return records, places
    return [records[place] for place in places.tolist()], places


def _row_keys(rows: list[Any]) -> int:
    return _keys(RowLine) * len(rows) + sum([len(row.shape) for row in rows])


def _keys(line: type) -> int:
    """How many keys a line of this class has, but for its shape's and an error."""
    return sum(field.name not in _OPTIONAL for field in fields(line))


def chunks(file: Readable) -> Iterator[bytes]:
    """Whole lines, few enough that their objects stay near a core, without the last newline.

    What follows the last newline is left out, but for what is too long to be a line.
    """
    rest = b""
    while block := file.read(_CHUNK_BYTES):
        lines, newline, last = block.rpartition(b"\n")
        if newline:
            yield rest + lines
            rest = last
        else:
            rest += last
        if len(rest) > _LONGEST_LINE:
            yield rest


def decode(text: bytes) -> Lines:
    """Decode some lines, without the last newline.

    Raises:
        WrongError: one of them is none of a profile's lines, or has a key twice.
    """
    if len(text) > _LONGEST_LINE and max(map(len, text.split(b"\n"))) > _LONGEST_LINE:
        raise WrongError
    decoder, _ = _decoder()
    try:
        if _are_objects(text):
            found = Lines.of(text, decoder.decode_lines(text))
            if len(found.records) == text.count(b"\n") + 1 and found.have_each_key_once:
                return found
        split = text.split(b"\n")
        if not any(map(suspicion, split)):
            return Lines.of(text, list(map(decoder.decode, split)))
    except (ValueError, RecursionError) as failure:
        raise WrongError from failure
    raise WrongError


def decode_launches(texts: Sequence[bytes]) -> list[Any]:
    """What ``RowLine.launches`` says, of rows whose fields are decoded but for these.

    Raises:
        WrongError: they are no launches.
    """
    try:
        return list(map(_launches_decoder().decode, texts))
    except (ValueError, RecursionError) as failure:
        raise WrongError from failure


def _are_objects(text: bytes) -> bool:
    """Each line begins and ends with a brace: then none ends within an object."""
    if text[:1] != b"{" or text[-1:] != b"}":
        return False
    letters = np.frombuffer(text, dtype=np.uint8)
    between = np.flatnonzero(letters == ord("\n"))
    return bool((letters[between - 1] == ord("}")).all() and (letters[between + 1] == ord("{")).all())


@cache
def _decoder() -> tuple[Any, dict[type, int]]:
    """Of all lines, as strict as ``read_line`` but for keys that are there twice; and the kinds of what it returns."""
    import msgspec

    found = {}
    for line in get_args(Line):
        hints = get_type_hints(line)
        if "launches" in hints:
            hints["launches"] = msgspec.Raw
        (tag,) = get_args(hints.pop("record"))
        rest = [(name, hint, *((None,) if name in _OPTIONAL else ())) for name, hint in hints.items()]
        struct = msgspec.defstruct(
            line.__name__, rest, tag_field="record", tag=tag, forbid_unknown_fields=True, gc=False
        )
        found[struct] = _KINDS.get(line, OTHER)
    return msgspec.json.Decoder(reduce(or_, found)), found


@cache
def _launches_decoder() -> Any:
    import msgspec

    return msgspec.json.Decoder(get_type_hints(RowLine)["launches"])


def read_line(line: bytes, where: str) -> Line:
    """Validate a line, as strictly as can be.

    Raises:
        ProfileError: with ``where`` and the field that is wrong.
    """
    from pydantic import ValidationError

    check_length(line, where)
    try:
        record: Line = _reader().validate_json(line, strict=True)
    except ValidationError as failure:
        first = failure.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or "the line"
        raise malformed(f"{where}: {field}: {first['msg']}") from failure
    if reason := suspicion(line):
        raise malformed(f"{where}: {reason}")
    return record


@cache
def _reader() -> Any:
    from typing import Annotated

    from pydantic import Field, TypeAdapter

    return TypeAdapter(Annotated[Line, Field(discriminator="record")])


def check_length(line: bytes, where: str) -> None:
    """Refuse a line that no profile has, before anything is made of it."""
    if len(line) > _LONGEST_LINE:
        raise malformed(f"{where}: a line of over {_LONGEST_LINE:,} bytes")


def malformed(given: str) -> ProfileError:
    return ProfileError(
        given,
        "JSON Lines as gac profile writes them: a header, then kernel names and rows",
        "Restore the file, or measure again with gac profile.",
    )
