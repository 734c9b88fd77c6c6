"""Save and load a compressed model: safetensors and JSON, whole or absent, no pickles, no code."""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from gac.compression.card import model_card
from gac.compression.fusing import as_run, fuse_inputs
from gac.compression.layers import empty_module
from gac.errors import CheckpointError, GacError
from gac.files import check_inside, from_json, open_to_umask
from gac.models.families import family_of
from gac.models.linears import as_linear
from gac.models.loading import UNREADABLE, default_device, is_checkpoint, quiet_transformers
from gac.plan import Plan, WeightChoice

__all__ = ["is_checkpoint", "load_checkpoint", "save_checkpoint"]

SCHEMA = 1
_INDEX = "model.safetensors.index.json"
_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class _Module:
    """What ``config.json`` says of one weight that is no longer dense."""

    form: str
    dim: int
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class _Header:
    """The key ``gac`` of ``config.json``: everything needed to build the modules."""

    schema_version: int
    modules: dict[str, _Module]
    __pydantic_config__ = _STRICT


def save_checkpoint(
    model: PreTrainedModel, directory: str | Path, tokenizer: Any = None, *, overwrite: bool = False
) -> None:
    """Write a compressed model as a directory that appears whole or not at all.

    It holds sharded safetensors, ``config.json`` with the forms and dims under ``gac``, the generation config,
    ``plan.json``, a model card, and the tokenizer's files where one is given. Loading it gives the same logits
    bit for bit. (A model that was cast by ``.to(torch.bfloat16)`` has rounded its rotary frequencies too, which
    are no weights; load it in the dtype instead.)

    Args:
        model: made by ``gac.compress`` or loaded from such a directory; its plan is ``model.gac_plan``.
        overwrite: replace a compressed checkpoint that is there already, once the new one is complete.

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
    try:
        check_free(target, overwrite)
        with _new_directory(target) as part:
            with quiet_transformers():
                model.save_pretrained(part)
            if tokenizer is not None:
                tokenizer.save_pretrained(part)
            _write_header(part / "config.json", plan)
            plan.save(part / "plan.json")
            (part / "README.md").write_text(model_card(plan), encoding="utf-8")
            for shard in part.glob("*.safetensors"):
                open_to_umask(shard)
    except (OSError, SafetensorError) as failure:
        raise CheckpointError(
            f"{target} cannot be written: {failure}", "a writable place with room", "Choose another directory."
        ) from failure


def load_checkpoint(
    directory: str | Path, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Open a directory that ``save_checkpoint`` wrote; in eval mode, with its plan as ``gac_plan``.

    No code and no pickle of the directory is run.

    Args:
        device: None takes the GPU if there is one.
        dtype: None keeps the checkpoint's.

    Raises:
        CheckpointError: a file is missing or damaged, or the files contradict one another.
    """
    source = Path(directory)
    check_inside(source, CheckpointError)
    plan = _read_plan(source)
    _check_shards(source)
    config = _read_config(source)
    _check_against_family(source, config, plan)
    with _reading(source), quiet_transformers():
        model, report = _compressed_class(config, _changed(plan)).from_pretrained(
            source, config=config, dtype=dtype or "auto", use_safetensors=True, output_loading_info=True
        )
    _check_complete(source, report)
    model.__class__ = model.__class__.__base__
    model.gac_plan = plan
    fuse_inputs(model, as_run(plan, family_of(config).sites(config)))
    loaded: PreTrainedModel = model.eval().to(device or default_device())
    return loaded


def _compressed_class(config: Any, choices: tuple[WeightChoice, ...]) -> Any:
    """A subclass of the model's class that builds the compressed modules.

    So transformers' own loading does the rest as for any model: meta tensors, shards, tied weights, buffers
    that are in no file. The instance gets its own class back when it is loaded.
    """
    dense: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    def build(self: Any, config: Any, *args: Any, **options: Any) -> None:
        dense.__init__(self, config, *args, **options)
        for choice in choices:
            weight = self.get_submodule(choice.name)
            self.set_submodule(choice.name, _replacement(weight, choice))
            # Some architectures (GPT-2) initialise a weight through the module that holds it, which no longer finds it.
            self.get_submodule(choice.name.rpartition(".")[0])._is_hf_initialized = True

    return type(dense.__name__, (dense,), {"__init__": build, "__module__": dense.__module__})


def _replacement(dense: Any, choice: WeightChoice) -> nn.Module:
    return empty_module(choice, dense.bias is not None, dense.weight.device, dense.weight.dtype)


def _changed(plan: Plan) -> tuple[WeightChoice, ...]:
    return tuple(choice for choice in plan.weights if choice.form != "dense")


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
def _new_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory beside ``target``; move it there on success, remove it on failure."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    part.mkdir()
    try:
        yield part
        for file in part.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        _move(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _move(part: Path, target: Path) -> None:
    """Rename onto ``target``; what was there steps aside first, and comes back if that fails."""
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


def _write_header(path: Path, plan: Plan) -> None:
    modules = {choice.name: {"form": choice.form, "dim": choice.dim} for choice in _changed(plan)}
    config = json.loads(path.read_bytes())
    config["gac"] = {"schema_version": SCHEMA, "modules": modules}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _read_plan(source: Path) -> Plan:
    """The plan, where ``config.json`` agrees with it."""
    if not is_checkpoint(source):
        raise CheckpointError(
            f"{source} has no config.json with a key gac",
            "a directory that gac.save wrote",
            "Check the path; open a dense model with transformers.",
        )
    config = json.loads((source / "config.json").read_bytes())
    header = from_json(_Header, json.dumps(config["gac"]), f"{source / 'config.json'}, key gac", CheckpointError)
    if header.schema_version != SCHEMA:
        raise CheckpointError(
            f"{source} has schema version {header.schema_version}",
            f"version {SCHEMA}",
            "Open it with the version of GAC that wrote it.",
        )
    try:
        plan = Plan.load(source / "plan.json")
    except GacError as failure:
        raise CheckpointError(failure.given, failure.expected, "Save the model again.") from failure
    planned = {choice.name: _Module(choice.form, choice.dim) for choice in _changed(plan)}
    if planned != header.modules:
        name = min(name for name, _ in planned.items() ^ header.modules.items())
        given, expected = (_in_words(modules.get(name)) for modules in (header.modules, planned))
        raise _contradiction(source, f"config.json has {name} {given}", f"{expected}, as plan.json says")
    return plan


def _in_words(module: _Module | None) -> str:
    return f"{module.form} with dim {module.dim}" if module else "dense"


def _contradiction(source: Path, given: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{source}: {given}", expected, "Save the model again; these files were changed.")


def _check_shards(source: Path) -> None:
    """The index names files of this directory, and they are there."""
    path = source / _INDEX
    names = {"model.safetensors"}
    if path.exists():
        try:
            names = set(json.loads(path.read_bytes())["weight_map"].values())
        except UNREADABLE as failure:
            raise _contradiction(source, f"{_INDEX} is no index", "a weight_map from weights to files") from failure
    for name in sorted(map(str, names)):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise _contradiction(source, f"{_INDEX} names the file {name!r}", "a safetensors file of this directory")
        if not (source / name).is_file():
            raise _contradiction(source, f"{name} is missing", "every file that gac.save wrote")


@contextlib.contextmanager
def _reading(source: Path) -> Iterator[None]:
    """Turn what transformers raises for files it cannot read into one CheckpointError."""
    try:
        yield
    except UNREADABLE as failure:
        reason = str(failure).strip().partition("\n")[0].rstrip(".")
        raise CheckpointError(
            f"{source} cannot be loaded: {reason}", "files as gac.save wrote them", "Save or copy the model again."
        ) from failure


def _read_config(source: Path) -> Any:
    auto: Any = AutoConfig
    with _reading(source):
        return auto.from_pretrained(source, trust_remote_code=False)


def _check_against_family(source: Path, config: Any, plan: Plan) -> None:
    """The plan's weights are weights of this config, with its dims."""
    weights = {weight.name: weight for site in family_of(config).sites(config) for weight in site.weights}
    for choice in plan.weights:
        weight = weights.get(choice.name)
        if weight is None:
            raise _contradiction(source, f"plan.json names the weight {choice.name}", "a weight that config.json has")
        dims = (choice.out_features, choice.in_features, choice.neurons, choice.blocks)
        if dims != (weight.out_features, weight.in_features, weight.neurons, weight.blocks) or (
            choice.values and (choice.values, choice.heads) != (weight.values, weight.heads)
        ):
            raise _contradiction(
                source,
                f"plan.json has {choice.name} {choice.out_features} x {choice.in_features}",
                f"{weight.out_features} x {weight.in_features}, as config.json says",
            )


def _check_complete(source: Path, report: Mapping[str, Any]) -> None:
    for problem in ("missing", "unexpected", "mismatched"):
        names = sorted(map(str, report[f"{problem}_keys"]))
        if names:
            given = f"{names[0]} is {problem} ({len(names)} in all)"
            raise _contradiction(source, given, "the weights of the plan, each once")
