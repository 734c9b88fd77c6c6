"""A checkpoint's files: which tensors are where, read without running code from a pickle."""

import json
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gac.checkpoint.shards import shard_names
from gac.errors import CheckpointError, first_line
from gac.forms.tensors import Insertion
from gac.models.loading import UNREADABLE

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
PICKLES = (".bin", ".pt", ".pth")

_DTYPES = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    | {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8}
    | {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def added_bytes(self, put_in: Iterable[Insertion]) -> int:
        """By how many bytes it grows."""
        shape = list(self.shape)
        for one in put_in:
            shape[one.axis] += one.count
        return prod(shape) * self.dtype.itemsize - self.bytes


@dataclass(frozen=True)
class Source:
    """A checkpoint's directory: its config, and its tensors in safetensors files or in pickles.

    Attributes:
        files: names of the files that hold the weights, in order.
        index: name of the file that says which tensor is in which of them; None where there is but one.
    """

    directory: Path
    files: tuple[str, ...]
    index: str | None

    @property
    def pickled(self) -> bool:
        return not self.files[0].endswith(".safetensors")

    @cached_property
    def config(self) -> dict[str, Any]:
        path = self.directory / "config.json"
        try:
            config = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as failure:
            raise CheckpointError(
                f"{path} cannot be read: {failure}", "the config of a transformers model", "Check the path."
            ) from failure
        if not isinstance(config, dict):
            raise CheckpointError(f"{path} holds a {type(config).__name__}", "a JSON object", "Check the path.")
        return config

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor by name; of safetensors files only the headers are read."""
        found: dict[str, StoredTensor] = {}
        for file in self.files:
            for name, stored in self._listed(file):
                if name in found:
                    raise CheckpointError(
                        f"{self.directory}: {name} is in {found[name].file} and in {file}",
                        "every tensor once",
                        "Copy the checkpoint again.",
                    )
                found[name] = stored
        return found

    def matrix(self, name: str) -> tuple[int, int]:
        """The shape of a tensor that is to be a matrix.

        Raises:
            CheckpointError: it is none.
        """
        shape = self.tensors[name].shape
        if len(shape) != 2:
            raise self.contradiction(f"{name} of shape {shape}", "a matrix")
        return shape[0], shape[1]

    def contradiction(self, given: str, expected: str) -> CheckpointError:
        """The error to raise where tensors contradict one another or the config."""
        return CheckpointError(f"{self.directory}: {given}", expected, "Save or copy the checkpoint again.")

    def read(self, file: str) -> dict[str, Tensor]:
        """The tensors of one file, on the CPU.

        Raises:
            CheckpointError: it is damaged, or a pickle that holds more than tensors.
        """
        path = self.directory / file
        if self.pickled:
            return _unpickled(path)
        with _damaged(path), safe_open(path, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping

    def _listed(self, file: str) -> Iterator[tuple[str, StoredTensor]]:
        path = self.directory / file
        if self.pickled:
            for name, tensor in _unpickled(path).items():
                yield name, StoredTensor(file, tuple(tensor.shape), tensor.dtype)
            return
        with _damaged(path), safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                part = opened.get_slice(name)
                yield name, StoredTensor(file, tuple(part.get_shape()), _DTYPES[part.get_dtype()])


def open_source(directory: Path, *, allow_pickle: bool) -> Source:
    """Find the weights of a checkpoint: safetensors, else a PyTorch file where that is allowed.

    Raises:
        CheckpointError: there is no such directory, it has no config or no weights, a file is missing, or the weights
            are pickled and ``allow_pickle`` is not given.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory", "a checkpoint's directory", "Check the path.")
    source = Source(directory, *_weights(directory))
    if source.pickled and not allow_pickle:
        raise CheckpointError(
            f"{directory} has its weights in {source.files[0]}, a pickle",
            "safetensors files",
            "Pass --allow-pickle (allow_pickle=True) if you trust where it is from; it is read with weights_only=True.",
        )
    return source


def _weights(directory: Path) -> tuple[tuple[str, ...], str | None]:
    for whole in (SAFE, PICKLED):
        index = f"{whole}.index.json"
        if (directory / index).is_file():
            return shard_names(directory, index, Path(whole).suffix), index
        if (directory / whole).is_file():
            return (whole,), None
    others = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLES)
    if len(others) != 1:
        held = f"the pickles {', '.join(others)}" if others else "no weights"
        raise CheckpointError(
            f"{directory} has {held}",
            f"{SAFE}, {PICKLED}, the index of either, or a single .pt file of a state_dict",
            f"Name the one with the weights {PICKLED}." if others else "Check the path.",
        )
    return (others[0],), None


def _unpickled(path: Path) -> dict[str, Tensor]:
    """A state_dict; the unpickler makes tensors and plain containers, and refuses everything else."""
    expected = "a state_dict: tensors by name, and nothing else"
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (*UNREADABLE, EOFError, pickle.UnpicklingError) as failure:
        raise CheckpointError(
            f"{path} cannot be read: {first_line(failure)}",
            expected,
            "Save model.state_dict() where you trust the code that the pickle names.",
        ) from failure
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(f"{path} holds other things than tensors", expected, "Save model.state_dict() alone.")
    return found


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, KeyError) as failure:
        raise CheckpointError(
            f"{path} cannot be read: {failure}", "a whole safetensors file", "Copy the checkpoint again."
        ) from failure
