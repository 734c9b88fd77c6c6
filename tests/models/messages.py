"""Small multimodal models in directories with processors, images, and files of messages about them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import ProcessorMixin

from gac.measurement.images import BY_TOKEN
from gac.testing.models import tiny_tokenizer
from tests.models.wrappers import IMAGE_TOKEN, image_inputs, wrapper_config, wrapper_model

TEMPLATE = (
    "<s>{% for message in messages %}{{ message.role }}:{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}</s>{% endfor %}"
)
IMAGE_ID = 258
"""Of ``<image>``, which follows the tiny tokenizer's own tokens."""


def llava_directory(folder: Path) -> Path:
    """A tiny Llava with all that its processor needs: four features an image."""
    config = wrapper_config("llava", image_token_index=IMAGE_ID, text_config={"vocab_size": 260})
    wrapper_model(config).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    parts = {
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    }
    for name, content in parts.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def messages_file(folder: Path, answers: Sequence[str], images: Sequence[int] | None = None) -> Path:
    """Write a line for each answer, with so many images of random pixels, one if none is named."""
    folder.mkdir(exist_ok=True)
    rng, lines = np.random.default_rng(0), list[str]()
    for line, answer in enumerate(answers):
        parts = list[dict[str, Any]]()
        for image in range(1 if images is None else images[line]):
            Image.fromarray(rng.integers(0, 255, (40, 30, 3), dtype=np.uint8)).save(folder / f"{line}-{image}.png")
            parts.append({"type": "image", "path": f"{line}-{image}.png"})
        user = {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}
        lines.append(json.dumps({"messages": [user, {"role": "assistant", "content": answer}]}))
    (folder / "messages.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "messages.jsonl"


class SmallProcessor(ProcessorMixin):
    """Makes of messages what a small model takes: a token a byte, and random pixels times an image's brightness."""

    def __init__(self, model: Any) -> None:
        self.tokenizer, self._inputs = tiny_tokenizer(), image_inputs(model)
        self._features = int((self._inputs.pop("input_ids") == IMAGE_TOKEN).sum())
        self._of_tokens = [name for name in self._inputs if name in BY_TOKEN]

    def apply_chat_template(self, conversation: Any, **_options: Any) -> Any:
        ids, brightness = list[int](), list[float]()
        for part in (part for message in conversation for part in message["content"]):
            if part["type"] == "image":
                brightness.append(np.asarray(part["image"]).mean() / 128)
                ids += [IMAGE_TOKEN] * self._features
            else:
                ids += self.tokenizer(part["text"], add_special_tokens=False).input_ids
        row = torch.tensor([ids])
        read = {"input_ids": row, "attention_mask": torch.ones_like(row)}
        if not brightness:
            return read
        read |= {name: (row == IMAGE_TOKEN).long() for name in self._of_tokens if name != "attention_mask"}
        for name in self._inputs.keys() - {*self._of_tokens}:
            tensor = self._inputs[name]
            read[name] = tensor * brightness[0] if tensor.is_floating_point() else tensor
        return read
