"""Read a checkpoint's tensors, from safetensors or from pickles, without running code from a pickle."""

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from gac.checkpoint.files import open_tensors, weight_files
from gac.checkpoint.verify import verify
from gac.core.errors import CheckpointError, first_line
from gac.core.untrusted import check_inside, check_model_files, read_model_json
from gac.models.loading import UNREADABLE, is_checkpoint
from gac.runtime.contract import DIGESTS

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
PICKLES = (".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Source:
    """A checkpoint's directory: the files with its weights, and the index of these if there are several."""

    directory: Path
    files: tuple[str, ...]
    index: str | None

    @property
    def pickled(self) -> bool:
        return not self.files[0].endswith(".safetensors")

    @cached_property
    def has_plan(self) -> bool:
        return is_checkpoint(self.directory)

    @cached_property
    def config(self) -> dict[str, Any]:
        path = self.directory / "config.json"
        return read_model_json(path, "the config of a transformers model", CheckpointError)

    @cached_property
    def by_file(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The tensors of each file by name, on the CPU, memory-mapped."""
        if self.pickled:
            return {file: _unpickled(self.directory / file) for file in self.files}
        return {file: open_tensors(self.directory, (file,)) for file in self.files}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for file, more in self.by_file.items():
            for name in tensors.keys() & more:
                raise self.contradiction(f"{name} is in {file} and in another file", "every tensor once")
            tensors |= more
        return tensors

    def matrix(self, name: str) -> tuple[int, int]:
        """The shape of a tensor; raises CheckpointError if it is no matrix."""
        shape = tuple(self.tensors[name].shape)
        if len(shape) != 2:
            raise self.contradiction(f"{name} of shape {shape}", "a matrix")
        return shape[0], shape[1]

    def contradiction(
        self, problem: str, expected: str, remedy: str = "Save or copy the checkpoint again."
    ) -> CheckpointError:
        return CheckpointError(f"{self.directory}: {problem}", expected, remedy)


def open_source(directory: Path, *, allow_pickle: bool) -> Source:
    """Find the weights of a checkpoint: safetensors, else a PyTorch file if that is allowed.

    A CheckpointError says if a file is missing, leads out of the directory or is a pipe, the weights are pickled and
    ``allow_pickle`` is False, or a checkpoint of GAC was changed after it was saved.
    """
    if not os.path.isdir(directory):
        raise CheckpointError(f"{directory}: no such directory", "a checkpoint's directory", "Check the path.")
    for folder in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        check_inside(folder, CheckpointError)
    check_model_files(directory, CheckpointError)
    if is_checkpoint(directory) and (directory / DIGESTS).exists():
        verify(directory)  # the repaired one gets digests of its own, which must not hide that something was changed
    source = Source(directory, *_find_weights(directory))
    if source.pickled and not allow_pickle:
        raise CheckpointError(
            f"{directory} has its weights in {source.files[0]}, a pickle",
            "safetensors files",
            "Pass --allow-pickle (allow_pickle=True) if you trust where it is from; it is read with weights_only=True.",
        )
    return source


def _find_weights(directory: Path) -> tuple[tuple[str, ...], str | None]:
    for name in (SAFE, PICKLED):
        if (directory / name).is_file() or (directory / f"{name}.index.json").is_file():
            return weight_files(directory, name)
    others = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLES)
    if len(others) != 1:
        raise CheckpointError(
            f"{directory} has " + (f"the pickles {', '.join(others)}" if others else "no weights"),
            f"{SAFE}, {PICKLED}, the index of either, or a single .pt file of a state_dict",
            f"Name the one with the weights {PICKLED}." if others else "Check the path.",
        )
    return (others[0],), None


def _unpickled(path: Path) -> dict[str, Tensor]:
    expected = "a state_dict: tensors by name, and nothing else"
    try:
        # the unpickler makes tensors and plain containers, and refuses everything else
        tensors: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except (*UNREADABLE, EOFError, pickle.UnpicklingError) as failure:
        remedy = "Save model.state_dict() where you trust the code that the pickle names."
        raise CheckpointError(f"{path} cannot be read: {first_line(failure)}", expected, remedy) from failure
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise CheckpointError(f"{path} holds other things than tensors", expected, "Save model.state_dict() alone.")
    return tensors
