"""The files by which a processor makes a multimodal model's inputs: they go with the model, as they are."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, ProcessorMixin
from transformers.utils.hub import cached_file

from gac.core.errors import ModelError, first_line
from gac.core.untrusted import read_bytes, read_model_json
from gac.models.loading import UNREADABLE
from gac.models.threads import LOADING

_PARTS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_AUTO: Any = AutoProcessor  # not annotated
_PACKAGES = {"torchvision": "torchvision", "pillow": "pillow"}
"""Packages that processors need, by the names that errors of transformers have for them."""
_KIND = "a processor's file"


def processor_files(name: str) -> dict[str, bytes]:
    """The files of the processor of a directory or a hub id, by name.

    A ModelError says if there are none, if one cannot be read, or if one names code of its own.
    """
    remedy = "Copy the processor's files beside the weights, or pass it as tokenizer=."
    paths = _paths(name)
    if not paths.keys() & {*_PARTS}:
        raise ModelError(f"the model {name!r} came without a processor", f"one of {', '.join(_PARTS)}", remedy)
    for part in (part for part in _PARTS if part in paths):
        if code := read_model_json(paths[part], _KIND, ModelError).get("auto_map"):
            problem = f"{part} of {name} names code of its own ({json.dumps(code)[:80]})"
            raise ModelError(problem, "a processor that transformers has", f"{remedy} Its code is not copied.")
    return {part: read_bytes(path, _KIND, _KIND, ModelError) for part, path in paths.items()}


def tokenizer_of(reader: Any) -> Any:
    """The tokenizer of a processor; anything else as it is."""
    return reader.tokenizer if isinstance(reader, ProcessorMixin) else reader


def load_processor(reader: Any) -> Any:
    """The processor of a directory or a hub id, that from where a tokenizer was read, or the reader itself.

    A ModelError says if there is none.
    """
    if isinstance(reader, ProcessorMixin):
        return reader
    name = str(reader) if isinstance(reader, str | Path) else str(getattr(reader, "name_or_path", ""))
    if not name:
        problem, remedy = f"a {type(reader).__name__} for text with images", "Pass AutoProcessor.from_pretrained(...)."
        raise ModelError(problem, "a processor, which reads images too", remedy)
    processor_files(name)
    try:
        with LOADING:
            processor = _AUTO.from_pretrained(name, trust_remote_code=False)
    except UNREADABLE as failure:
        missing = next((package for part, package in _PACKAGES.items() if part in str(failure).lower()), None)
        if missing is not None:
            problem = f"the processor of {name} without the package {missing}"
            raise ModelError(problem, f"{missing}, which it reads images with", f"pip install {missing}") from failure
        problem = f"the processor of {name} cannot be read: {first_line(failure)}"
        expected, remedy = "one that AutoProcessor of transformers reads", "Pass a processor as tokenizer=."
        raise ModelError(problem, expected, remedy) from failure
    if isinstance(processor, ProcessorMixin):
        return processor
    problem = f"{name} gives a {type(processor).__name__} as processor"
    raise ModelError(problem, "a processor of text and images", "Copy the processor's files beside the weights.")


def _paths(name: str) -> dict[str, Path]:
    lenient = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    paths = dict[str, Path]()
    for part in (*_PARTS, *_TEMPLATES):
        with suppress(*UNREADABLE), LOADING:  # no such repository, or no name of one
            if path := cached_file(name, part, **lenient):
                paths[part] = Path(path)
    return paths
