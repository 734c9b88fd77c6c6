"""Text about images: a JSONL file of chat messages, made into examples by the processor of a multimodal model.

Each line is ``{"messages": [...]}`` in the format of Hugging Face: the content of a message is a string, or a list of
``{"type": "text", "text": ...}`` and ``{"type": "image", "path": ...}``, where the path begins at the file's folder.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gac.core.errors import ModelError, TextError, first_line
from gac.measurement.documents import check_characters
from gac.models.examples import Example
from gac.models.families import family_of
from gac.models.loading import UNREADABLE
from gac.runtime.contract import COMPRESSED

_FORMAT = (
    '{"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "text", ...}]}, ...]}'
)
_BOTH_WAYS = {"paligemma": "which reads its whole prompt in both directions"}
"""Multimodal models that predict no token of a prompt from those before it alone."""
BY_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What processors return with a number for each token."""
_Message = dict[str, Any]


def holds_messages(name: str) -> bool:
    """Return whether this is a JSONL file whose first line has messages."""
    if not name.endswith(".jsonl") or not Path(name).is_file():
        return False
    with open(name, "rb") as file:
        line = next((line for line in file if line.strip()), b"")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and "messages" in row


def check_takes_images(config: Any, name: str) -> None:
    """Refuse a model to which the images of file ``name`` cannot be shown in the place of tokens."""
    kind, problem = str(config.model_type).removeprefix(COMPRESSED), ""
    if not family_of(config).inside:
        problem = "a language model without vision"
    elif getattr(config, "image_token_id", None) is None:
        problem = "a multimodal model without a token that stands for an image"
    else:
        problem = _BOTH_WAYS.get(kind, "")
    if problem:
        expected = "a multimodal model that reads images in the place of tokens"
        raise ModelError(f"messages of {name} for a {kind}, {problem}", expected, "Give it text without images.")


def read_examples(
    path: str, processor: Any, config: Any, windows: int | None, length: int | None, seed: int = 0
) -> tuple[list[Example], bool]:
    """Read examples, padded at the end, and whether they are all of the file.

    Args:
        processor: the model's, which writes messages as token ids and images as pixels.
        windows: how many, in even steps through the file, or drawn where there is a ``seed``; None takes all.
        length: tokens of each; what is longer is cut at its end. None: those of the longest.

    Raises:
        TextError: a line is no messages, or messages without text, an image is missing or cannot be read, there are too
            few lines or no image in them, or an image would be cut.
        ModelError: the model takes no images, or the processor cannot read the messages.
    """
    check_takes_images(config, path)
    lines = _lines(path)
    if windows is not None and not 1 <= windows <= len(lines):
        problem, expected = f"{path} has {len(lines)} examples", f"at least 1, and the {windows} asked for"
        raise TextError(problem, expected, f"Ask for at most {len(lines)}.")
    count = windows or len(lines)
    drawn = np.arange(count) * len(lines) // count
    if seed:
        drawn = np.sort(np.random.default_rng(seed).choice(len(lines), count, replace=False))
    read = [_Reading(path, number, processor, int(config.image_token_id)) for number, _ in lines]
    each = [read[index].inputs(lines[index][1]) for index in drawn]
    longest = max(inputs["input_ids"].shape[1] for inputs in each)
    examples = [read[index].example(inputs, length or longest) for index, inputs in zip(drawn, each, strict=True)]
    if not any(example.inputs for example in examples):
        raise TextError(f"{path} without an image", "at least one", "Give text without images as a text file.")
    return examples, count == len(lines)


def digest_of_examples(examples: Sequence[Example]) -> str:
    """SHA-256 of all that the model is given, and of what it has to predict."""
    digest = hashlib.sha256()
    for example in examples:
        tensors = {"ids": example.ids, "text": example.text, **dict(sorted(example.inputs.items()))}
        for name, tensor in tensors.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _lines(path: str) -> list[tuple[int, list[_Message]]]:
    """The messages of each line that is not blank, with its number."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as failure:
        problem = f"file of messages {path} cannot be read: {failure}"
        raise TextError(problem, "a readable UTF-8 file", "Check the file and its encoding.") from failure
    check_characters(text, f"file of messages {path}")
    return [(number, _parsed(line, path, number)) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _parsed(line: str, path: str, number: int) -> list[_Message]:
    where = f"line {number} of {path}"
    try:
        messages = json.loads(line)["messages"]
        made: list[_Message] = [
            {"role": str(message["role"]), "content": list(_parts(message["content"], where))} for message in messages
        ]
    except (ValueError, TypeError, LookupError, RecursionError) as failure:
        raise TextError(f"{where} is no object with messages", _FORMAT, "Correct the line.") from failure
    if not any(part.get("text", "").strip() for message in made for part in message["content"]):
        raise TextError(f"{where} has messages without text", "text to predict", "Add text, or leave the line out.")
    return made


def _parts(content: Any, where: str) -> Iterator[dict[str, str]]:
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        name = {"text": "text", "image": "path"}.get(part["type"])
        if name is None or not isinstance(part.get(name), str):
            problem = f"{where} has a part of type {part['type']!r} with {', '.join(map(str, part))}"
            raise TextError(problem, "a text, or an image by its path", f"Write it so: {_FORMAT}.")
        yield {"type": part["type"], name: part[name]}


class _Reading:
    """A line of a file as a processor reads it."""

    def __init__(self, path: str, number: int, processor: Any, image_token: int) -> None:
        self._folder, self._where = Path(path).parent, f"line {number} of {path}"
        self._processor, self._image_token = processor, image_token

    def inputs(self, messages: Sequence[_Message]) -> Mapping[str, Tensor]:
        """Inputs of the model: ``input_ids``, ``pixel_values`` and more."""
        loaded = [message | {"content": [*map(self._with_image, message["content"])]} for message in messages]
        has_images = any(part["type"] == "image" for message in loaded for part in message["content"])
        kind = type(self._processor).__name__
        try:
            inputs = self._processor.apply_chat_template(loaded, tokenize=True, return_dict=True, return_tensors="pt")
        except UNREADABLE as failure:
            problem = f"{self._where} cannot be read by a {kind}: {first_line(failure)}"
            remedy = "Try processor.apply_chat_template on it, or use another processor."
            raise ModelError(problem, "a processor with a chat template that takes these messages", remedy) from failure
        tensors = {name: tensor for name, tensor in inputs.items() if isinstance(tensor, Tensor)}
        if has_images and not (tensors["input_ids"] == self._image_token).any():
            problem = f"the chat template of a {kind} leaves out the image in {self._where}"
            raise ModelError(problem, "a token for it", "Use the chat template that belongs to the model.")
        return tensors if has_images else {"input_ids": tensors["input_ids"]}

    def example(self, inputs: Mapping[str, Tensor], length: int) -> Example:
        """Cut or pad all that has a number for each token."""
        ids, more = inputs["input_ids"], dict[str, Tensor]()
        tokens, missing = min(ids.shape[1], length), max(0, length - ids.shape[1])
        if (ids[0, tokens:] == self._image_token).any():
            problem = f"{self._where} has an image behind token {length:,}"
            raise TextError(problem, "images that fit", f"Ask for {ids.shape[1]:,} tokens, or for smaller images.")
        for name, tensor in inputs.items():
            more[name] = pad(tensor[:, :tokens], (0, missing)) if name in BY_TOKEN else tensor
        text = (more.pop("input_ids")[0] != self._image_token) & (torch.arange(length) < tokens)
        if (kinds := more.get("mm_token_type_ids")) is not None:
            text &= kinds[0] == 0
        if not text[1:].any():
            problem = f"{self._where} has no text in its first {length:,} tokens"
            raise TextError(problem, "text to predict", "Ask for more tokens.")
        more.pop("attention_mask", None)  # nothing attends to the padding
        filler = self._processor.tokenizer.pad_token_id or 0
        return Example(pad(ids[0, :tokens], (0, missing), value=filler), more, tokens, text)

    def _with_image(self, part: dict[str, str]) -> dict[str, Any]:
        if part["type"] != "image":
            return part
        try:
            from PIL import Image
        except ImportError as failure:
            problem = f"the images of {self._where} without the package pillow"
            raise ModelError(problem, "pillow, which reads them", "pip install pillow") from failure
        file = self._folder / part["path"]
        try:
            with Image.open(file) as image:
                return {"type": "image", "image": image.convert("RGB")}
        except (OSError, ValueError, Image.DecompressionBombError) as failure:
            problem = f"image {file}, in {self._where}, cannot be read: {first_line(failure)}"
            expected = "an image that exists, by a path that begins at the folder of the file"
            raise TextError(problem, expected, "Correct the path, or leave the line out.") from failure
