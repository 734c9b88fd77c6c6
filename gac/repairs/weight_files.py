"""A checkpoint's files: which tensors are where, read without running code from a pickle."""

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from torch import Tensor

from gac.checkpoint.verify import verify
from gac.checkpoint.weights import weight_files
from gac.core.errors import CheckpointError, first_line
from gac.core.untrusted import check_inside, check_model_files, check_safetensors_header, read_model_json
from gac.models.loading import UNREADABLE, is_checkpoint
from gac.runtime.contract import DIGESTS

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
PICKLES = (".bin", ".pt", ".pth")


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
        return read_model_json(path, "the config of a transformers model", CheckpointError)

    @cached_property
    def by_file(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The tensors of each file by name, on the CPU; they map the files, so values are read where they are used.

        Raises:
            CheckpointError: a file is damaged, or a pickle that holds more than tensors.
        """
        return {file: _mapped(self.directory / file) for file in self.files}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        found: dict[str, Tensor] = {}
        for file, held in self.by_file.items():
            for name in found.keys() & held:
                first = next(other for other, tensors in self.by_file.items() if name in tensors)
                raise self.contradiction(f"{name} is in {first} and in {file}", "every tensor once")
            found |= held
        return found

    def matrix(self, name: str) -> tuple[int, int]:
        """The shape of a tensor that is to be a matrix.

        Raises:
            CheckpointError: it is none.
        """
        shape = tuple(self.tensors[name].shape)
        if len(shape) != 2:
            raise self.contradiction(f"{name} of shape {shape}", "a matrix")
        return shape[0], shape[1]

    def contradiction(
        self, given: str, expected: str, remedy: str = "Save or copy the checkpoint again."
    ) -> CheckpointError:
        """The error to raise where tensors contradict one another or the config."""
        return CheckpointError(f"{self.directory}: {given}", expected, remedy)


def open_source(directory: Path, *, allow_pickle: bool) -> Source:
    """Find the weights of a checkpoint: safetensors, else a PyTorch file where that is allowed.

    Raises:
        CheckpointError: there is no such directory, it has no config or no weights, a file is missing, leads out of it
            or is a pipe, the weights are pickled and ``allow_pickle`` is not given, or it is a checkpoint of GAC that
            is not as it was saved.
    """
    if not os.path.isdir(directory):
        raise CheckpointError(f"{directory}: no such directory", "a checkpoint's directory", "Check the path.")
    for folder in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        check_inside(folder, CheckpointError)
    check_model_files(directory, CheckpointError)
    if is_checkpoint(directory) and (directory / DIGESTS).exists():
        verify(directory)  # the repaired one gets digests of its own, which must not hide that something was changed
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
        if (directory / whole).is_file() or (directory / f"{whole}.index.json").is_file():
            return weight_files(directory, whole)
    others = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLES)
    if len(others) != 1:
        held = f"the pickles {', '.join(others)}" if others else "no weights"
        raise CheckpointError(
            f"{directory} has {held}",
            f"{SAFE}, {PICKLED}, the index of either, or a single .pt file of a state_dict",
            f"Name the one with the weights {PICKLED}." if others else "Check the path.",
        )
    return (others[0],), None


def _mapped(path: Path) -> dict[str, Tensor]:
    safe = path.suffix == ".safetensors"
    expected = "a state_dict: tensors by name, and nothing else"
    remedy = "Save model.state_dict() where you trust the code that the pickle names."
    if safe:
        expected = "a whole safetensors file"
        remedy = "Copy the checkpoint again."
    try:
        found: Any = _safe_tensors(path) if safe else _unpickled(path)
    except (*UNREADABLE, EOFError, pickle.UnpicklingError) as failure:
        raise CheckpointError(f"{path} cannot be read: {first_line(failure)}", expected, remedy) from failure
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(f"{path} holds other things than tensors", expected, "Save model.state_dict() alone.")
    return found


def _safe_tensors(path: Path) -> Any:
    check_safetensors_header(path)
    with safe_open(path, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping


def _unpickled(path: Path) -> Any:
    """The unpickler makes tensors and plain containers, and refuses everything else."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
