"""Load a compressed model: safetensors and JSON, no pickles, no code of the directory."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from gac.checkpoint.agreement import agreed_plan, contradiction, digest_of, own_plan
from gac.checkpoint.classes import classes_of
from gac.checkpoint.digest import is_unchanged, with_digest
from gac.checkpoint.header import check_version, header_of
from gac.checkpoint.shards import check_there, shard_names
from gac.errors import CheckpointError, first_line
from gac.io import check_inside, read_bytes
from gac.models.families import check_layers, family_of, supported
from gac.models.loading import UNREADABLE, default_device, escaped_logs, is_checkpoint, quiet_transformers
from gac.plan import Plan
from gac.runtime.construction import uncollected
from gac.runtime.contract import COMPRESSED

_INDEX = "model.safetensors.index.json"


def load_checkpoint(
    directory: str | Path, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Open a directory that ``save_checkpoint`` wrote; in eval mode, with its plan as ``gac_plan``.

    No code and no pickle of the directory is run. Where plan, header and dims are as they were written, the plan is
    read when it is first asked for; otherwise it is read and compared here.

    Args:
        device: None takes the GPU if there is one.
        dtype: None keeps the checkpoint's.

    Raises:
        CheckpointError: a file is missing or damaged, or the files contradict one another.
    """
    with uncollected():
        model = _load(Path(directory), dtype or "auto")
    place = torch.device(device or default_device())
    loaded: PreTrainedModel = model if model.device == place else model.to(place)  # a move looks at every parameter
    return loaded


def _load(source: Path, dtype: torch.dtype | str) -> Any:
    check_inside(source, CheckpointError)
    config, model_type = _described(source)
    plan = None if _is_untouched(source, config) else _planned(source, config)
    if (source / _INDEX).exists():
        shard_names(source, _INDEX)
    else:
        check_there(source, "model.safetensors")
    classes = classes_of(model_type)
    with _reading(source), quiet_transformers():
        model, report = classes.causal_lm.from_pretrained(
            source, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    _check_complete(source, report)
    if plan is not None:
        model.gac_plan = plan
    return model


def read_plan(source: Path) -> Plan:
    """The plan of a directory.

    Raises:
        CheckpointError: ``config.json`` does not agree with it, or one of the two is missing or damaged.
    """
    return _planned(source, _described(source)[0])


def write_header(directory: Path) -> None:
    """Write the key ``gac`` of ``config.json`` anew, from the ``plan.json`` beside it.

    Raises:
        CheckpointError: one of the two is missing or damaged.
    """
    text = (directory / "plan.json").read_bytes()
    described, _ = _described(directory)
    sites = family_of(described).sites(described)
    config = json.loads((directory / "config.json").read_bytes())
    config["gac"] = with_digest(header_of(own_plan(_reader(directory)), sites, digest_of(text)), described)
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _is_untouched(source: Path, config: Any) -> bool:
    """Whether plan, header and the dims of weights are those that were written together."""
    if not is_unchanged(config.gac, config):
        return False
    try:
        text = read_bytes(source / "plan.json", "plan", "a plan", CheckpointError)
    except CheckpointError:  # reading the plan will raise it
        return False
    return bool(config.gac.get("plan") == digest_of(text))


def _planned(source: Path, config: Any) -> Plan:
    return agreed_plan(_reader(source), config, source, _named(source))


def _reader(source: Path) -> Callable[[], Plan]:
    return partial(Plan.load, source / "plan.json")


def _described(source: Path) -> tuple[Any, str]:
    """A config whose key ``gac`` is of this schema, and the dense architecture's type."""
    if not is_checkpoint(source):
        raise CheckpointError(
            f"{source} has no config.json with a key gac",
            "a directory that gac.save wrote",
            "Check the path; open a dense model with transformers.",
        )
    document = json.loads((source / "config.json").read_bytes())
    check_version(document["gac"], _named(source))
    model_type = str(document.get("model_type"))
    dense = model_type.removeprefix(COMPRESSED)
    if dense == model_type or dense not in supported():
        raise contradiction(source, f"config.json has the model_type {model_type!r}", f"one like {COMPRESSED}llama")
    with _reading(source):
        check_layers(document)
        config = classes_of(dense).config.from_pretrained(source)
    return config, dense


def _named(source: Path) -> str:
    return f"{source / 'config.json'}, key gac"


@contextlib.contextmanager
def _reading(source: Path) -> Iterator[None]:
    """Turn what transformers raises for files it cannot read into one CheckpointError."""
    try:
        with escaped_logs():
            yield
    except UNREADABLE as failure:
        raise CheckpointError(
            f"{source} cannot be loaded: {first_line(failure)}",
            "files as gac.save wrote them",
            "Save or copy the model again.",
        ) from failure


def _check_complete(source: Path, report: Mapping[str, Any]) -> None:
    """Nothing lies in the files that the model has no place for."""
    if names := sorted(map(str, report["unexpected_keys"])):
        given = f"{names[0]} is unexpected ({len(names)} in all)"
        raise contradiction(source, given, "the weights of the plan, each once")
