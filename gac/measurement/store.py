"""Files of statistics for one model and one text: finished layers, and the snapshot of an interrupted run."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryFile, mkdtemp
from typing import Any
from weakref import finalize

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gac.core.arrays import Floats
from gac.core.errors import StatisticsError
from gac.core.io import atomic_path

_safe_open: Any = safe_open  # not annotated


CPU = torch.device("cpu")


@dataclass(frozen=True)
class StatisticsStore:
    """Finished layers on disk, so that calibration resumes and is not repeated.

    Attributes:
        directory: one directory for one model, one calibration text and one p (name it by their digests).
    """

    directory: Path

    def path(self, name: str, layer: int) -> Path:
        return self.directory / f"{name}-{layer:04d}.safetensors"

    @property
    def boundary(self) -> Path:
        """Path of the snapshot of an interrupted calibration: the gradients between two layers."""
        return self.directory / "boundary.safetensors"

    def delete(self) -> None:
        rmtree(self.directory, ignore_errors=True)

    def check_writable(self) -> None:
        with _writing(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.directory):
                pass


def temporary_store() -> StatisticsStore:
    """A store whose files are deleted once nobody refers to it."""
    store = StatisticsStore(Path(mkdtemp(prefix="gac-statistics-")))
    finalize(store, rmtree, store.directory, ignore_errors=True)
    return store


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as one safetensors file that is whole or absent."""
    with _writing(path), atomic_path(path) as temporary_path:
        save_file(_on_cpu(tensors), temporary_path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as failure:
        raise StatisticsError(
            f"saved results cannot be written to {path}: {failure}",
            "a writable place with room, which GAC_HOME names",
            "Make room or set GAC_HOME, and run the same again: what was saved before is kept.",
        ) from failure


def read_tensors(path: Path, device: torch.device) -> dict[str, Tensor]:
    """Every tensor of a file; FileNotFoundError where there is none, StatisticsError if it cannot be read."""
    with _reading(path):
        return load_file(path, device=str(device))


def read_arrays(path: Path) -> dict[str, Floats]:
    return {name: tensor.numpy() for name, tensor in read_tensors(path, CPU).items()}


def read_rows(path: Path, name: str, rows: slice) -> Tensor:
    """Some rows of one tensor of a file; raises as ``read_tensors`` does."""
    with _reading(path), _safe_open(path, framework="pt") as file:
        rows_read: Tensor = file.get_slice(name)[rows]
        return rows_read


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError) as failure:
        raise StatisticsError(
            f"saved results {path} cannot be read: {failure}",
            "a file as GAC wrote it",
            "Delete it: what it held is computed again.",
        ) from failure


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file by name, each read when it is asked for; raises as ``read_tensors`` does."""

    def __init__(self, path: Path, device: torch.device) -> None:
        with _reading(path):
            self._file = _safe_open(path, framework="pt", device=str(device))
        self._names = frozenset(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def background_writer() -> Iterator[Callable[[Mapping[Path, Mapping[str, Tensor]]], None]]:
    """Write files while the GPU works, one set at a time, so that at most one is in host memory.

    It takes tensors to the host once the files before them are written, begins to write theirs, in order, and raises
    what writing the files before raised. All are written on exit.
    """
    with ThreadPoolExecutor(1, "gac-writer") as pool:
        last: Future[None] | None = None

        def write(files: Mapping[Path, Mapping[str, Tensor]]) -> None:
            nonlocal last
            if last is not None:
                last.result()
            on_cpu = {path: _on_cpu(tensors) for path, tensors in files.items()}
            last = pool.submit(_write_all, on_cpu)

        yield write
        if last is not None:
            last.result()


def _write_all(files: Mapping[Path, Mapping[str, Tensor]]) -> None:
    for path, tensors in files.items():
        write_tensors(path, tensors)


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
