"""The directory that a model is written to: it appears whole or not at all."""

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import ProcessorMixin

from gac.core.errors import CheckpointError, ModelError
from gac.core.io import destination, open_to_umask, sync_directory
from gac.models.loading import is_checkpoint, load_tokenizer, quiet_transformers
from gac.models.processors import processor_files

logger = logging.getLogger("gac")


def check_free(target: Path, overwrite: bool | None = None) -> None:
    """Refuse a directory that holds something else, or a compressed checkpoint that must not be replaced.

    ``overwrite`` allows to replace it; None where nobody can ask for that.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    expected, remedy = "a new or empty directory", "Choose another directory"
    if not is_checkpoint(target):
        raise CheckpointError(f"{target} exists and is no compressed checkpoint", expected, f"{remedy}.")
    if not overwrite:
        remedy += ", or pass overwrite=True (--overwrite)." if overwrite is False else "."
        raise CheckpointError(f"{target} holds a compressed checkpoint", expected, remedy)


@contextlib.contextmanager
def complete_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory beside ``target``; move it there on success, remove it on failure.

    Raises:
        CheckpointError: something cannot be written, or the target exists and is no directory.
    """
    try:
        target = destination(target, directory=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
        part.mkdir()
        try:
            with quiet_transformers():
                yield part
            for shard in part.glob("*.safetensors"):
                open_to_umask(shard)
            for file in filter(Path.is_file, part.rglob("*")):
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            sync_directory(part)
            _move(part, target)
            sync_directory(target.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except (OSError, SafetensorError) as failure:
        raise CheckpointError(
            f"{target} cannot be written: {failure}", "a writable place with room", "Choose another directory."
        ) from failure


def save_tokenizer(part: Path, tokenizer: Any, name: str, multimodal: bool = False) -> None:
    """Write a tokenizer's files; None takes the one of that name, and says so where there is none.

    Of a ``multimodal`` model the files of its processor go with them, unless the tokenizer is a whole processor.
    """
    try:
        result = load_tokenizer(name) if tokenizer is None else tokenizer
    except ModelError as failure:
        logger.warning("saving without a tokenizer: %s", failure)
    else:
        result.save_pretrained(part)
    if multimodal and not isinstance(tokenizer, ProcessorMixin):
        try:
            files = processor_files(name)
        except ModelError as failure:
            logger.warning("saving without a processor: %s", failure)
        else:
            for file in (file for file in files if not (part / file).exists()):
                (part / file).write_bytes(files[file])


def _move(part: Path, target: Path) -> None:
    if not is_checkpoint(target):
        part.rename(target)  # an empty directory is replaced
        return
    old = part.with_suffix(".old")
    target.rename(old)
    try:
        part.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old)
