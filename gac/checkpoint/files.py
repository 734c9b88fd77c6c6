"""The files of a compressed checkpoint, each read and checked by itself: config, plan, weights."""

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from gac.checkpoint.classes import classes_of
from gac.checkpoint.header import agreed_plan, contradiction, header_of
from gac.core.errors import CheckpointError
from gac.core.untrusted import read_bytes, read_model_json
from gac.models.config_fields import check_config, check_content, check_generation_config
from gac.models.families import supported
from gac.models.loading import reading
from gac.plan.plan import Plan
from gac.runtime.contract import COMPRESSED, COMPRESSED_TENSORS, QUANTIZATION, SCHEMA, chooses_code

_ADAPTER = "adapter_config.json"
_SHOWN = 80  # letters of a name
_QUANTISERS = ("bitsandbytes", "torchao", COMPRESSED_TENSORS)


def read_config(source: Path) -> dict[str, Any]:
    """The text of ``config.json`` as it stands."""
    path = source / "config.json"
    document = read_model_json(path, "the config that gac.save wrote", CheckpointError) if os.path.exists(path) else {}
    if "gac" not in document:
        raise CheckpointError(
            f"{source} has no config.json with a key gac",
            "a directory that gac.save wrote",
            "Check the path; open a dense model with transformers.",
        )
    version = document["gac"].get("schema_version") if isinstance(document["gac"], dict) else None
    if version != SCHEMA:
        raise CheckpointError(
            f"{source / 'config.json'}, key gac: schema version {version}",
            f"version {SCHEMA}",
            f"Make it again: gac compress MODEL --plan {source / 'plan.json'} -o DIRECTORY.",
        )
    _check_no_code(document, source)
    return document


def described(document: dict[str, Any], source: Path) -> Any:
    """The transformers config of a compressed architecture that a document describes."""
    model_type = str(document.get("model_type"))
    dense = model_type.removeprefix(COMPRESSED)
    if dense == model_type or dense not in supported():
        raise contradiction(source, f"config.json has the model_type {model_type!r}", f"one like {COMPRESSED}llama")
    with unread(source):
        check_content(document)
        check_generation_config(source, CheckpointError)
        config = classes_of(dense).config.from_pretrained(source)
        check_config(config)
    return config


def _check_no_code(document: dict[str, Any], source: Path) -> None:
    inner = [value for name, value in document.items() if isinstance(value, dict) and name != QUANTIZATION]
    for key, value in ((key, item[key]) for item in (document, *inner) for key in item):
        if chooses_code(key):
            raise contradiction(source, f"config.json has {key} {str(value)[:80]!r}", "no key that chooses code")
    code = document.get("auto_map", {})
    named = code.values() if isinstance(code, dict) else [code]
    if foreign := next((str(name) for name in named if not str(name).startswith("modeling_gac.Gac")), None):
        raise contradiction(source, f"config.json has the code {foreign!r} in auto_map", "GAC's own, modeling_gac.Gac*")
    quantiser = document.get(QUANTIZATION, {"quant_method": _QUANTISERS[0]})
    if not isinstance(quantiser, dict) or quantiser.get("quant_method") not in _QUANTISERS:
        raise contradiction(
            source, f"config.json has the quantiser {str(quantiser)[:80]}", f"none, or {' or '.join(_QUANTISERS)}"
        )
    if (source / _ADAPTER).exists():
        raise CheckpointError(
            f"{source} holds an adapter, {_ADAPTER}",
            "a model by itself: an adapter changes its function",
            "Move the adapter to a directory of its own, and apply it with model.load_adapter.",
        )


def plan_text(source: Path) -> bytes:
    """The plan's file."""
    return read_bytes(source / "plan.json", "plan", "a plan", CheckpointError)


def read_plan(source: Path) -> Plan:
    """The plan of a directory.

    Raises:
        CheckpointError: ``config.json`` does not agree with it, or one of the two is missing or damaged.
    """
    return agreed_plan(plan_text(source), described(read_config(source), source), source)


def write_header(directory: Path, plan: Plan) -> None:
    """Write the key ``gac`` of ``config.json`` again, from the plan beside it.

    Raises:
        CheckpointError: one of the two files is missing or damaged.
    """
    config = read_config(directory)
    config["gac"] = header_of(plan, described(config, directory), plan_text(directory))
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def unread(source: Path) -> AbstractContextManager[None]:
    """Turn what transformers, or the runtime in it, raises for files of this directory into a CheckpointError."""

    def error(said: str) -> CheckpointError:
        value, _, expected = said.removeprefix(f"{source}: ").removesuffix(".").partition("; expected ")
        expected = expected or "files as gac.save wrote them"
        return CheckpointError(f"{source} cannot be loaded: {value}", expected, "Save or copy the model again.")

    return reading(error)
