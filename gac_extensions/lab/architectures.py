"""Verdicts on every causal and image-text architecture of the installed transformers: taken, or refused and why.

``python -m gac_extensions.lab.architectures > docs/architectures.md`` writes the page. Nothing is downloaded: verdicts
need a default config, and those of unknown layouts a model of two layers without memory for its weights.
"""

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.pytorch_utils import Conv1D

from gac.core.errors import ModelError
from gac.models.families import family_of, supported, wrappers
from gac.runtime.contract import COMPRESSED

TAKEN, EXPERTS, ENTRY, MULTIMODAL = "taken", "a mixture of experts", "could be an entry", "a multimodal model"
_KIND = re.compile(r"^model type '[^']*', (?P<kind>.*)$")
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_LAYER = re.compile(r"^(?P<layers>.+?)\.0\.(?P<name>.+)$")


@dataclass(frozen=True)
class Verdict:
    """The verdict on an architecture: its ``model_type``, the group that it belongs to, and what is said of it."""

    model_type: str
    group: str
    reason: str = ""


def architectures() -> tuple[str, ...]:
    """The ``model_type`` of every causal and image-text-to-text architecture of transformers."""
    mappings: tuple[Mapping[Any, Any], ...] = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    known = (name for name, config in CONFIG_MAPPING.items() if any(config in each for each in mappings))
    return tuple(sorted(name for name in known if not name.startswith(COMPRESSED)))


def verdict_of(model_type: str) -> Verdict:
    """Say whether GAC takes models of this type, from their default config."""
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception as failure:  # noqa: BLE001  # whatever an architecture of transformers raises
        return Verdict(model_type, "no default config", _first_words(failure))
    try:
        family_of(config)
    except ModelError as failure:
        if (match := _KIND.match(failure.given)) and model_type in (*supported(), *wrappers()):
            return Verdict(model_type, TAKEN, f"not {match['kind'].partition(' (')[0]}")  # but that by default
        return _refused(model_type, config, failure)
    return Verdict(model_type, TAKEN)


def _refused(model_type: str, config: Any, failure: ModelError) -> Verdict:
    match = _KIND.match(failure.given)
    if match is None:
        return Verdict(model_type, ENTRY, _layout(config))
    kind = match["kind"]
    for group in (EXPERTS, MULTIMODAL):
        if kind.startswith(group):
            return Verdict(model_type, group, kind.removeprefix(group).strip(" ()"))
    return Verdict(model_type, kind)


def _layout(config: Any) -> str:
    """The linear weights of the first layer, by their names in it."""
    for name in _COUNTS:
        with contextlib.suppress(Exception):
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, 2)
    for name in ("layer_types", "mlp_layer_types"):
        with contextlib.suppress(Exception):
            if getattr(config, name, None):
                setattr(config, name, list(getattr(config, name))[:2])
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else None
    classes = classes or MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    try:
        with torch.device("meta"):
            model = classes[type(config)]._from_config(config)
    except Exception as failure:  # noqa: BLE001
        return f"cannot be built: {_first_words(failure)}"
    linears = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    matches = [match for match in map(_LAYER.match, linears) if match]
    if not matches:
        return "no linear weights in numbered layers"
    layers = matches[0]["layers"]
    names = [match["name"] for match in matches if match["layers"] == layers]
    return f"`{layers}`: {', '.join(f'`{name}`' for name in names)}"


def _first_words(failure: Exception) -> str:
    text = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {text[:90]}".replace("|", "/")


def page() -> Iterator[str]:
    """Lines of the page."""
    verdicts = [verdict_of(name) for name in architectures()]
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.group, []).append(verdict)
    taken = groups.pop(TAKEN, [])
    yield "# Architectures"
    yield ""
    yield (
        f"Of the {len(verdicts)} causal and image-text architectures of transformers {transformers.__version__} GAC "
        f"takes {len(taken)}. A family is [one entry of data](models.md#adding-a-family). This page is made by"
    )
    yield ""
    yield "```bash"
    yield "python -m gac_extensions.lab.architectures > docs/architectures.md"
    yield "```"
    yield ""
    multimodal = [verdict for verdict in taken if verdict.model_type in wrappers()]
    yield f"**Taken**: {_names([verdict for verdict in taken if verdict not in multimodal])}."
    yield ""
    yield f"**Taken, multimodal** ([the decoder is compressed](models.md#multimodal-models)): {_names(multimodal)}."
    for group, members in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        yield ""
        yield f"## Refused: {group} ({len(members)})"
        yield ""
        if group == EXPERTS or not any(verdict.reason for verdict in members):
            yield f"{_names(members)}."
            continue
        yield "| model_type | |"
        yield "| --- | --- |"
        yield from (f"| `{verdict.model_type}` | {verdict.reason} |" for verdict in members)


def _names(verdicts: list[Verdict]) -> str:
    limits = (f" ({verdict.reason})" if verdict.group == TAKEN and verdict.reason else "" for verdict in verdicts)
    return ", ".join(f"`{verdict.model_type}`{limit}" for verdict, limit in zip(verdicts, limits, strict=True))


if __name__ == "__main__":
    sys.stdout.write("\n".join(page()) + "\n")
