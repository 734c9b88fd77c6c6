"""Load a compressed model: safetensors and JSON, no pickles, no code of the directory."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from gac.arguments import checked
from gac.checkpoint.attach import PlannedModel
from gac.checkpoint.classes import classes_of
from gac.checkpoint.header import agreed_plan, contradiction, digest_of, header_of, is_unchanged
from gac.errors import CheckpointError
from gac.io import check_inside, read_bytes
from gac.models.families import check_layers, supported
from gac.models.loading import UNREADABLE, is_checkpoint, quiet_transformers, reading, usable_device
from gac.models.threads import LOADING
from gac.plan import Plan
from gac.runtime.compressed import uncollected
from gac.runtime.contract import COMPRESSED, SCHEMA


@checked
def load(
    directory: str | Path, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> PlannedModel:
    """Open a directory that ``save`` wrote, in eval mode, with its plan as ``gac_plan``; runs no code from it.

    Where plan, header and dims are as they were written, the plan is read when it is first asked for; otherwise it is
    read and compared here.

    Args:
        device: None takes the GPU if there is one.
        dtype: None keeps the checkpoint's.

    Raises:
        CheckpointError: a file is missing or damaged, or the files contradict one another.
        ModelError: there is no such device.
    """
    place = usable_device(device)
    with LOADING, uncollected():
        model = _load(Path(directory), dtype or "auto")
    loaded: PlannedModel = model if model.device == place else model.to(place)  # a move looks at every parameter
    return loaded


def _load(source: Path, dtype: torch.dtype | str) -> Any:
    check_inside(source, CheckpointError)
    config, text = _described(source), _plan_text(source)
    untouched = is_unchanged(config.gac, config) and config.gac.get("plan") == digest_of(text)
    plan = None if untouched else agreed_plan(text, config, source)
    weight_files(source)
    classes = classes_of(config.model_type.removeprefix(COMPRESSED))
    with _reading(source), quiet_transformers():
        model, report = classes.causal_lm.from_pretrained(
            source, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    if names := sorted(map(str, report["unexpected_keys"])):
        given = f"{names[0]} is unexpected ({len(names)} in all)"
        raise contradiction(source, given, "the weights of the plan, each once")
    if plan is not None:
        model.gac_plan = plan
    return model


def read_plan(source: Path) -> Plan:
    """The plan of a directory.

    Raises:
        CheckpointError: ``config.json`` does not agree with it, or one of the two is missing or damaged.
    """
    return agreed_plan(_plan_text(source), _described(source), source)


def write_header(directory: Path, plan: Plan) -> None:
    """Write the key ``gac`` of ``config.json`` again, from the plan beside it.

    Raises:
        CheckpointError: one of the two files is missing or damaged.
    """
    config = json.loads((directory / "config.json").read_bytes())
    config["gac"] = header_of(plan, _described(directory), _plan_text(directory))
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def weight_files(directory: Path, whole: str = "model.safetensors") -> tuple[tuple[str, ...], str | None]:
    """The files that hold the weights, each once, in order, and the name of the index that names them.

    All lie in this directory, and all are there.

    Args:
        whole: what the file is called where there is but one; there is no index then.

    Raises:
        CheckpointError: the index cannot be read, names files elsewhere or of another kind, or a file is missing.
    """
    index = f"{whole}.index.json"
    indexed = (directory / index).exists()
    suffix = Path(whole).suffix
    named = _named_in(directory, index) if indexed else (whole,)
    for name in named:
        if Path(name).name != name or not name.endswith(suffix):
            raise _wrong(directory, f"{index} names the file {name!r}", f"a {suffix[1:]} file of this directory")
        if not (directory / name).is_file():
            raise _wrong(directory, f"{name} is missing", "every file that was saved")
    return named, index if indexed else None


def _named_in(directory: Path, index: str) -> tuple[str, ...]:
    try:
        names = set(json.loads((directory / index).read_bytes())["weight_map"].values())
    except UNREADABLE as failure:
        raise _wrong(directory, f"{index} is no index", "a weight_map from weights to files") from failure
    if not names:
        raise _wrong(directory, f"{index} names no file", "a weight_map from weights to files")
    return tuple(sorted(map(str, names)))


def _wrong(directory: Path, given: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{directory}: {given}", expected, "Save or copy the model again.")


def _plan_text(source: Path) -> bytes:
    return read_bytes(source / "plan.json", "plan", "a plan", CheckpointError)


def _described(source: Path) -> Any:
    """The config, of a compressed architecture, whose key ``gac`` is of this schema."""
    if not is_checkpoint(source):
        raise CheckpointError(
            f"{source} has no config.json with a key gac",
            "a directory that gac.save wrote",
            "Check the path; open a dense model with transformers.",
        )
    document = json.loads((source / "config.json").read_bytes())
    version = document["gac"].get("schema_version") if isinstance(document["gac"], dict) else None
    if version != SCHEMA:
        raise CheckpointError(
            f"{source / 'config.json'}, key gac: schema version {version}",
            f"version {SCHEMA}",
            "Open it with the version of GAC that wrote it, or compress the model again with its plan.json.",
        )
    model_type = str(document.get("model_type"))
    dense = model_type.removeprefix(COMPRESSED)
    if dense == model_type or dense not in supported():
        raise contradiction(source, f"config.json has the model_type {model_type!r}", f"one like {COMPRESSED}llama")
    with _reading(source):
        check_layers(document)
        return classes_of(dense).config.from_pretrained(source)


def _reading(source: Path) -> AbstractContextManager[None]:
    return reading(
        lambda said: CheckpointError(
            f"{source} cannot be loaded: {said}", "files as gac.save wrote them", "Save or copy the model again."
        )
    )
