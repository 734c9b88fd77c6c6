"""What was written into a GGUF file, and how far it is from the model."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from gac.checkpoint.gguf.content import Content


@dataclass(frozen=True)
class TensorsWritten:
    """The tensors of one scheme that have one type of GGUF.

    Attributes:
        scheme: of the plan; ``bf16`` for what is not rounded.
        type: of GGUF: ``Q5_0``.
        tensors: how many.
        bytes: that they take.
        moved: the largest change of one of them, as a part of its norm; 0 where all are carried bit for bit.
        why: dims that need a larger type, or another rounding; None where none do.
    """

    scheme: str
    type: str
    tensors: int
    bytes: int
    moved: float
    why: str | None


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file that was written.

    Attributes:
        path: of the file.
        architecture: what llama.cpp calls it.
        bytes: of the file.
        planned_bytes: of the weights that the plan decided on, as the plan counts them.
        weights_bytes: of the same weights in the file.
        tensors: by scheme and type, those that take most first.
        inputs: the schemes that round inputs too, which no file can ask of llama.cpp.
    """

    path: str
    architecture: str
    bytes: int
    planned_bytes: int
    weights_bytes: int
    tensors: tuple[TensorsWritten, ...]
    inputs: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether every number is the model's, bit for bit."""
        return all(one.moved == 0 for one in self.tensors)


def tensors_written(written: Iterable[tuple[Content, float]]) -> tuple[TensorsWritten, ...]:
    """The record of tensors and how far each moved."""

    def key(one: tuple[Content, float]) -> tuple[str, str, str]:
        content, _ = one
        return content.source.scheme, content.kind, content.why or ""

    found = []
    for (scheme, kind, why), several in groupby(sorted(written, key=key), key):
        contents, moved = zip(*several, strict=True)
        size = sum(one.nbytes for one in contents)
        found.append(TensorsWritten(scheme, kind, len(contents), size, max(moved), why or None))
    return tuple(sorted(found, key=lambda one: -one.bytes))
