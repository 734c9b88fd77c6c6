"""Save and load a compressed model: safetensors and JSON, whole or absent, no pickles, no code."""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from gac.checkpoint.attach import agreed_plan, carry_plan, contradiction, digest_of, own_plan
from gac.checkpoint.classes import classes_of
from gac.checkpoint.digest import is_sealed, sealed
from gac.checkpoint.header import check_version, header_of
from gac.checkpoint.shards import check_there, shard_names
from gac.errors import CheckpointError, first_line
from gac.io import check_inside, exchange, open_to_umask, read_bytes, sync_directory
from gac.models.families import COMPRESSED, check_layers, family_of, supported
from gac.models.linears import as_linear
from gac.models.loading import UNREADABLE, default_device, escaped_logs, is_checkpoint, quiet_transformers
from gac.plan import Plan
from gac.runtime.modeling import uncollected
from gac.runtime.modules import empty_module

__all__ = ["is_checkpoint", "load_checkpoint", "save_checkpoint"]

_INDEX = "model.safetensors.index.json"


def save_checkpoint(
    model: PreTrainedModel,
    directory: str | Path,
    tokenizer: Any = None,
    *,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a compressed model as a directory that appears whole or not at all.

    It holds sharded safetensors, ``config.json`` with the forms and dims under ``gac``, the generation config,
    ``plan.json``, a model card, the code that opens it without GAC, and the tokenizer's files where one is given.
    Loading it gives the same logits bit for bit. (A model that was cast by ``.to(torch.bfloat16)`` has rounded its
    rotary frequencies too, which are no weights; load it in the dtype instead.)

    Args:
        model: made by ``gac.compress`` or loaded from such a directory; its plan is ``model.gac_plan``.
        overwrite: replace a compressed checkpoint that is there already, once the new one is complete.
        max_shard_size: bytes, or as in ``5GB``, after which another file of weights begins.

    Raises:
        CheckpointError: the model carries no plan or no longer matches it, or the directory is in use or
            cannot be written.
    """
    target = Path(directory).resolve()
    plan = getattr(model, "gac_plan", None)
    if not isinstance(plan, Plan):
        raise CheckpointError(
            f"a {type(model).__name__} without a plan", "a model from gac.compress", "Compress it before saving."
        )
    _check_matches(model, plan)
    carry_plan(model, plan)
    check_free(target, overwrite)
    with complete_directory(target) as part:
        model.save_pretrained(part, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)


def load_checkpoint(
    directory: str | Path, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Open a directory that ``save_checkpoint`` wrote; in eval mode, with its plan as ``gac_plan``.

    No code and no pickle of the directory is run. Where plan, header and dims are as they were sealed, the plan is not
    read before it is asked for; otherwise it is read and compared here.

    Args:
        device: None takes the GPU if there is one.
        dtype: None keeps the checkpoint's.

    Raises:
        CheckpointError: a file is missing or damaged, or the files contradict one another.
    """
    with uncollected():
        model = _load(Path(directory), dtype or "auto")
    place = torch.device(device or default_device())
    loaded: PreTrainedModel = model if model.device == place else model.to(place)  # which looks at every parameter
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
    """The plan of a directory, where ``config.json`` agrees with it.

    Raises:
        CheckpointError: it does not, or one of the two is missing or damaged.
    """
    return _planned(source, _described(source)[0])


def write_header(directory: Path) -> None:
    """Say in ``config.json`` what the ``plan.json`` beside it has become.

    Raises:
        CheckpointError: one of the two is missing or damaged.
    """
    text = (directory / "plan.json").read_bytes()
    described, _ = _described(directory)
    sites = family_of(described).sites(described)
    config = json.loads((directory / "config.json").read_bytes())
    config["gac"] = sealed(header_of(own_plan(_reader(directory)), sites, digest_of(text)), described)
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _is_untouched(source: Path, config: Any) -> bool:
    """Whether plan, header and the dims of weights are those that were sealed together."""
    if not is_sealed(config.gac, config):
        return False
    try:
        text = read_bytes(source / "plan.json", "plan", "a plan", CheckpointError)
    except CheckpointError:  # which whoever reads the plan will say
        return False
    return bool(config.gac.get("plan") == digest_of(text))


def _planned(source: Path, config: Any) -> Plan:
    return agreed_plan(_reader(source), config, source, _named(source))


def _reader(source: Path) -> Callable[[], Plan]:
    return partial(Plan.load, source / "plan.json")


def _check_matches(model: PreTrainedModel, plan: Plan) -> None:
    """The model's modules are the plan's, all in one dtype: a checkpoint has but one."""
    for choice in plan.weights:
        module: Any = model.get_submodule(choice.name)
        found = {name: tuple(value.shape) for name, value in as_linear(module).state_dict().items()}
        wanted = empty_module(choice, any(name.endswith("bias") for name in found), "meta", model.dtype).state_dict()
        if found != {name: tuple(value.shape) for name, value in wanted.items()}:
            raise CheckpointError(
                f"{choice.name} is {module}",
                f"{choice.form} with dim {choice.dim}, as model.gac_plan says",
                "Save the model as gac.compress returned it.",
            )
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"weights in {' and '.join(sorted(dtypes))}", "one dtype for all weights", "Cast the model to one dtype."
        )


def check_free(target: Path, overwrite: bool) -> None:
    """Refuse a directory that holds something else, or a compressed checkpoint that must not be replaced.

    Raises:
        CheckpointError: it is in use.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not is_checkpoint(target):
        raise CheckpointError(
            f"{target} exists and is no compressed checkpoint", "a new or empty directory", "Choose another directory."
        )
    if not overwrite:
        raise CheckpointError(
            f"{target} holds a compressed checkpoint",
            "a new or empty directory",
            "Choose another directory, or pass overwrite=True.",
        )


@contextlib.contextmanager
def complete_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory beside ``target``; move it there on success, remove it on failure.

    Raises:
        CheckpointError: something cannot be written.
    """
    try:
        with _beside(target) as part:
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
    except (OSError, SafetensorError) as failure:
        raise CheckpointError(
            f"{target} cannot be written: {failure}", "a writable place with room", "Choose another directory."
        ) from failure


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A temporary directory; what has its name afterwards is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    part.mkdir()
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _move(part: Path, target: Path) -> None:
    """Rename onto ``target``; a checkpoint that is there changes places with ``part``, or steps aside first."""
    if not is_checkpoint(target):
        part.rename(target)  # an empty directory is replaced
        return
    if exchange(part, target):
        return
    old = part.with_suffix(".old")
    target.rename(old)
    try:
        part.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old)


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
