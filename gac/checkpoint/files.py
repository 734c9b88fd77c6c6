"""The files of a compressed checkpoint, each read and checked by itself: config, plan, weights."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, TypeVar

from safetensors import safe_open
from torch import Tensor, nn

from gac.checkpoint.header import agreed_plan, contradiction
from gac.core.errors import CheckpointError, GacError, first_line
from gac.core.untrusted import check_safetensors_header, is_plain_name, read_bytes, read_model_json
from gac.models.config_fields import check_config, check_content, check_generation_config
from gac.models.families import is_supported
from gac.models.loading import UNREADABLE, reading
from gac.plan.plan import Plan
from gac.runtime.contract import COMPRESSED, COMPRESSED_TENSORS, QUANTIZATION, SCHEMA, chooses_code
from gac.runtime.model import config_class
from gac.runtime.storage.modules import stored_names

T = TypeVar("T")
ATTEMPTS = 5
_ADAPTER = "adapter_config.json"
SHOWN = 80  # letters of a name or a value
_CLASSES = "gac.checkpoint.classes"  # where pickle finds a config's class
_QUANTISERS = ("bitsandbytes", "torchao", COMPRESSED_TENSORS)


def read_unreplaced(directory: Path, read: Callable[[], T], attempts: int = ATTEMPTS) -> T:
    """Return what ``read`` makes of a directory, all of it from the files of one and the same.

    A directory that replaces another, as ``save`` does with ``overwrite``, has files of its own, and a reader that
    opens files one by one may get some of each. Such a reading counts for nothing, failed or not, and is done again.
    """
    for _ in range(attempts):
        handle = None
        with suppress(OSError, ValueError):  # held open, so that no new directory is given its number
            handle = os.open(directory, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        before = _identity(directory if handle is None else handle)
        try:
            result = read()
            if _identity(directory) == before:
                return result
        except (GacError, *UNREADABLE):
            if _identity(directory) == before:
                raise
        finally:
            if handle is not None:
                os.close(handle)
    raise CheckpointError(
        f"{directory} was replaced while it was read ({attempts} of {attempts} times)",
        "a directory that nothing writes to",
        "Open it again when it is complete.",
    )


def _identity(path: Path | int) -> tuple[int, int] | None:
    with suppress(OSError, ValueError):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return None


def read_config(source: Path) -> dict[str, Any]:
    """The text of ``config.json`` as it stands."""
    path = source / "config.json"
    document = read_model_json(path, "the config that gac.save wrote", CheckpointError) if os.path.exists(path) else {}
    if "gac" not in document:
        remedy = "Check the path; open a dense model with transformers."
        if os.path.isfile(source):
            remedy = "Check the path; gac.Plan.load checks a plan (docs/limits.md, Check a plan yourself)."
        problem = f"{source} has no config.json with a key gac"
        raise CheckpointError(problem, "a directory that gac.save wrote", remedy)
    version = document["gac"].get("schema_version") if isinstance(document["gac"], dict) else None
    if version != SCHEMA:
        remedy = f"Make it again: gac compress MODEL --plan {source / 'plan.json'} -o DIRECTORY."
        raise CheckpointError(f"{path}, key gac: schema version {version}", f"version {SCHEMA}", remedy)
    _check_no_code(document, source)
    return document


def described(document: dict[str, Any], source: Path) -> Any:
    """The transformers config of a compressed architecture that a document describes."""
    model_type = str(document.get("model_type"))
    dense = model_type.removeprefix(COMPRESSED)
    if dense == model_type or not is_supported(dense):
        raise contradiction(source, f"config.json has the model_type {model_type!r}", f"one like {COMPRESSED}llama")
    with unread(source):
        check_content(document)
        check_generation_config(source, CheckpointError)
        config = config_class(dense, _CLASSES).from_pretrained(source)
        check_config(config)
    return config


def _check_no_code(document: dict[str, Any], source: Path) -> None:
    inner = [value for name, value in document.items() if isinstance(value, dict) and name != QUANTIZATION]
    for key, value in ((key, item[key]) for item in (document, *inner) for key in item):
        if chooses_code(key):
            raise contradiction(source, f"config.json has {key} {str(value)[:SHOWN]!r}", "no key that chooses code")
    code = document.get("auto_map", {})
    named = code.values() if isinstance(code, dict) else [code]
    if foreign := next((str(name) for name in named if not str(name).startswith("modeling_gac.Gac")), None):
        raise contradiction(source, f"config.json has the code {foreign!r} in auto_map", "GAC's own, modeling_gac.Gac*")
    quantiser = document.get(QUANTIZATION, {"quant_method": _QUANTISERS[0]})
    if not isinstance(quantiser, dict) or quantiser.get("quant_method") not in _QUANTISERS:
        value = f"config.json has the quantiser {str(quantiser)[:SHOWN]}"
        raise contradiction(source, value, f"none, or {' or '.join(_QUANTISERS)}")
    if (source / _ADAPTER).exists():
        raise CheckpointError(
            f"{source} holds an adapter, {_ADAPTER}",
            "a model by itself: an adapter changes its function",
            "Move the adapter to a directory of its own, and apply it with model.load_adapter.",
        )


def plan_text(source: Path) -> bytes:
    return read_bytes(source / "plan.json", "plan", "a plan", CheckpointError)


def read_plan(source: Path) -> Plan:
    """The plan of a directory; a CheckpointError if ``config.json`` contradicts it, or one of the two is damaged."""
    return agreed_plan(plan_text(source), described(read_config(source), source), source)


def unread(source: Path) -> AbstractContextManager[None]:
    """Turn what transformers, or the runtime in it, raises for files of this directory into a CheckpointError."""

    def error(said: str) -> CheckpointError:
        value, _, expected = said.removeprefix(f"{source}: ").removesuffix(".").partition("; expected ")
        expected = expected or "files as gac.save wrote them"
        return CheckpointError(f"{source} cannot be loaded: {value}", expected, "Save or copy the model again.")

    return reading(error)


def weight_files(directory: Path, full: str = "model.safetensors") -> tuple[tuple[str, ...], str | None]:
    """The files of this directory that hold the weights, each once, in order, and the name of the index, if any.

    ``full`` is the file's name if there is but one.
    """
    index = f"{full}.index.json"
    indexed = (directory / index).exists()
    suffix = Path(full).suffix
    named = _named_in(directory, index) if indexed else (full,)
    for name in named:
        if not is_plain_name(name) or not name.endswith(suffix):
            raise _wrong(
                directory, f"{index} names the file {name[:SHOWN]!r}", f"a {suffix[1:]} file of this directory"
            )
        if not (directory / name).is_file():
            raise _wrong(directory, f"{name} is missing", "every file that was saved")
    if full not in named and (directory / full).exists():  # which of the two is read depends on who reads it
        raise _wrong(directory, f"it holds {full} and {index}, each with weights of its own", "one of the two")
    return named, index if indexed else None


def open_tensors(directory: Path, files: tuple[str, ...]) -> dict[str, Tensor]:
    """Every tensor of these files by name, on the CPU; they map the files, so bytes are read where they are used."""
    result: dict[str, Tensor] = {}
    for file in files:
        try:
            check_safetensors_header(directory / file)
            with safe_open(directory / file, framework="pt") as opened:
                stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        except UNREADABLE as failure:
            value = f"{file} cannot be loaded: {first_line(failure)}"
            raise _wrong(directory, value, "a whole safetensors file") from failure
        if twice := sorted(result.keys() & stored):
            raise _wrong(directory, f"{twice[0]} is in {file} and in another file", "every tensor once")
        result |= stored
    return result


def check_dtypes(tensors: dict[str, Tensor], model: nn.Module, source: Path) -> None:
    """Refuse what transformers would convert without a word, in a model that was loaded from these tensors.

    Stored weights, integers and truth values have to have the model's own dtypes.
    """
    stored, state = stored_names(model), model.state_dict().items()
    fixed = {name: local.dtype for name, local in state if name in stored or not local.is_floating_point()}
    for name, values in tensors.items():
        if name in fixed and values.dtype != fixed[name]:
            raise contradiction(source, f"{name} is of {values.dtype}", str(fixed[name]))
        if name not in fixed and not values.is_floating_point():
            raise contradiction(source, f"{name} is of {values.dtype}", "weights in floating point")


def _named_in(directory: Path, index: str) -> tuple[str, ...]:
    expected = "a weight_map from weights to files"
    weights = read_model_json(directory / index, expected, CheckpointError).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise _wrong(directory, f"{index} is no index", expected)
    if not weights:
        raise _wrong(directory, f"{index} names no file", expected)
    return tuple(sorted({*weights.values()}))


def _wrong(directory: Path, value: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{directory}: {value}", expected, "Save or copy the model again.")
