"""Digests of a checkpoint as it was saved: of each tensor, each key of its config and each other file; and checks.

They show what was changed or mixed up. Whoever can write all files can also write digests that fit; so the SHA-256 of
the digests' file stands for the whole directory, to be compared with one that was kept elsewhere or signed.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gac.checkpoint.files import SHOWN, open_tensors, read_config, read_plan, read_unreplaced, weight_files
from gac.checkpoint.header import contradiction
from gac.core.arguments import checked
from gac.core.errors import CheckpointError
from gac.core.io import complete_file
from gac.core.untrusted import check_inside, check_model_files, file_digest, is_plain_name, read_model_json
from gac.models.digests import bytes_of
from gac.runtime.contract import DIGESTS
from gac.runtime.model import CODE
from gac.runtime.storage.packed import PackedIntegers

_CODE_OR_WEIGHTS = (".py", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".so", ".gguf")
_SCHEMA = 1
_SHAPES = tuple(f".{name}" for name in PackedIntegers.metadata)
_WEIGHTS = "model.safetensors"
# No logit follows from these keys of a config; from every other one may, also from those that GAC does not know.
_NOT_ESSENTIAL = frozenset(
    {"_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "use_cache"}
)
# Of other files: those that GAC, transformers or a tokenizer reads. People edit the card. Earlier versions of GAC wrote
# several Python files.
_READ = (".json", ".jinja", ".txt", ".model", ".py")
_NOT_READ = frozenset({"config.json", "adapter_config.json", DIGESTS})
_MAX_BYTES = 2**30  # of all files but config and weights together: tokenizers of a million tokens take a tenth


@dataclass(frozen=True)
class Digests:
    """As they stand in the file; a value of another type differs from every digest."""

    tensors: dict[str, Any]  # by name: ``dtype``, ``shape``, and the SHA-256 of the bytes, ``sha256``
    config: dict[str, Any]  # by key that is essential: the SHA-256 of its value, as JSON with sorted keys
    files: dict[str, Any]  # by name: the SHA-256 of a file that is neither config nor weights


def write_digests(directory: Path) -> None:
    """Write the digests of a directory whose other files are complete.

    There are none where transformers wrote the weights under another name, as a variant: gac.load opens no such thing.
    """
    if not any((directory / name).is_file() for name in (_WEIGHTS, f"{_WEIGHTS}.index.json")):
        return
    tensors = open_tensors(directory, weight_files(directory)[0])
    rows = {name: _described(values) | {"sha256": digest} for (name, values), digest in _with_digests(tensors)}
    files = {path.name for path in directory.iterdir() if path.is_file() and _is_read(path.name)}
    names = sorted(name for name in files if name == CODE or not name.endswith(".py"))  # foreign code gets no digest
    config = _of_config(read_model_json(directory / "config.json", "the config of a model", CheckpointError))
    result = Digests(rows, config, {name: file_digest(directory / name) for name in names})
    text = json.dumps({"schema_version": _SCHEMA} | asdict(result), indent=1)
    with complete_file(directory / DIGESTS, "digests", CheckpointError) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_digests(directory: Path) -> Digests | None:
    """The digests of a directory; None where there is no such file, as in what older versions wrote."""
    path, expected = directory / DIGESTS, "digests as gac.save wrote them"
    if not path.exists():
        return None
    document = read_model_json(path, expected, CheckpointError)
    members: list[Any] = [document.get(name) for name in ("tensors", "config", "files")]
    if document.get("schema_version") != _SCHEMA or not all(isinstance(member, dict) for member in members):
        raise CheckpointError(f"{path} holds no digests of version {_SCHEMA}", expected, "Copy the model again.")
    digests = Digests(*members)
    if foreign := [name for name in digests.files if not _is_read(name)]:
        value = f"{DIGESTS} names the file {foreign[0][:SHOWN]!r}"
        raise contradiction(directory, value, f"files of this directory in {', '.join(_READ)}")
    return digests


def check_config(document: Mapping[str, Any], digests: Digests, source: Path) -> None:
    """Raise a CheckpointError unless the essential keys are those that were saved, with their values."""
    result = _of_config(document)
    for key in sorted({*result, *digests.config}):
        if result.get(key) != digests.config.get(key):
            value = f"{str(document[key])[:SHOWN]!r}" if key in result else "missing"
            raise _differs(source, f"config.json has {key} {value}", "its value" if key in digests.config else "none")


def check_tensors(tensors: Mapping[str, Tensor], digests: Digests, source: Path) -> None:
    """Raise a CheckpointError unless names, dtypes and shapes are those that were saved."""
    for name in sorted({*tensors, *digests.tensors}):
        if name not in tensors or name not in digests.tensors:
            problem = "missing" if name not in tensors else "unexpected"
            raise _differs(source, f"{name} is {problem}", "the weights of the plan, each once")
        saved = digests.tensors[name]
        for key, value in _described(tensors[name]).items():
            due = saved.get(key) if isinstance(saved, dict) else saved
            if due != value:
                raise _differs(source, f"{name} has {key} {value}", str(due))


def check_files(names: Iterable[str], digests: Digests, source: Path) -> None:
    """Raise a CheckpointError unless files other than config and weights, by plain names, are as they were saved."""
    paths = {name: source / name for name in names}
    total = sum(path.stat().st_size for path in paths.values() if path.is_file())
    if total > _MAX_BYTES:
        raise _differs(source, f"files beside the weights of {total:,} bytes", f"at most {_MAX_BYTES:,} bytes")
    for name, path in paths.items():
        try:
            digest = file_digest(path) if path.exists() else "missing"
        except OSError as failure:
            raise contradiction(source, f"{name} cannot be read: {failure.strerror}", "a file") from failure
        if digest != digests.files.get(name, "missing"):
            value = f"{name} is missing" if digest == "missing" else f"{name} has the digest {digest[:12]}"
            raise _differs(source, value, "the file that was saved" if name in digests.files else "no such file")


def _is_read(name: str) -> bool:
    return is_plain_name(name) and name.endswith(_READ) and name not in _NOT_READ


def _of_config(document: Mapping[str, Any]) -> dict[str, str]:
    essential = {key: json.dumps(value, sort_keys=True) for key, value in document.items() if key not in _NOT_ESSENTIAL}
    return {key: hashlib.sha256(text.encode()).hexdigest() for key, text in essential.items()}


def _described(values: Tensor) -> dict[str, Any]:
    return {"dtype": str(values.dtype), "shape": list(values.shape)}


def _with_digests(tensors: Mapping[str, Tensor]) -> Iterator[tuple[tuple[str, Tensor], str]]:
    with ThreadPoolExecutor() as pool:  # hashing does not hold Python's lock
        digests = pool.map(lambda values: hashlib.sha256(bytes_of(values)).hexdigest(), tensors.values())
        yield from zip(tensors.items(), digests, strict=True)


def _differs(source: Path, value: str, expected: str) -> CheckpointError:
    return contradiction(source, value, f"{expected}, as {DIGESTS} says")


@dataclass(frozen=True)
class Verified:
    """A checkpoint that is as it was saved.

    To know that it is somebody's, compare ``digest`` with the one that they published.
    """

    digest: str  # the SHA-256 of its file of digests, which stands for all that was checked
    tensors: int
    bytes: int
    shape_bytes: int  # of them those that say the shape of a packed matrix, which no plan counts
    planned_bytes: int  # of the whole model in its plan, which counts 16 bits for a number that is not rounded
    keys: int  # of the config, that were checked
    files: int  # that were checked, besides config and weights
    not_checked: tuple[str, ...]  # what lies beside them and was not there when it was saved


@checked
def verify(directory: str | Path) -> Verified:
    """Check everything that a checkpoint was when it was saved, each tensor by its SHA-256.

    Nothing is run, and no model is built. A CheckpointError names what differs, and code or weights that lie beside it
    and were not there; or there are no digests.
    """
    source = Path(directory)
    return read_unreplaced(source, lambda: _verified(source))


def _verified(source: Path) -> Verified:
    check_inside(source, CheckpointError)
    check_model_files(source, CheckpointError)
    document = read_config(source)
    digests = read_digests(source)
    if digests is None:
        raise CheckpointError(
            f"{source} has no {DIGESTS}",
            "the digests that gac.save writes beside the weights",
            "Get the checkpoint anew with its digests, or save it again from files that you trust.",
        )
    plan = read_plan(source)
    check_config(document, digests, source)
    files, index = weight_files(source)
    tensors = open_tensors(source, files)
    check_tensors(tensors, digests, source)
    check_files([*digests.files, *([index] if index else [])], digests, source)
    known = {*digests.files, *files, "config.json", "README.md", DIGESTS}  # nothing reads the card and hidden files
    others = sorted(path.name for path in source.iterdir() if path.name not in known and path.name[0] != ".")
    if unlisted := next((name for name in others if name.endswith(_CODE_OR_WEIGHTS)), None):
        value = f"{unlisted} was not there when it was saved"
        raise contradiction(source, value, "no other code and no other weights")
    for (name, _), digest in _with_digests(tensors):
        if digests.tensors[name].get("sha256") != digest:
            raise _differs(source, f"the values of {name} have the digest {digest[:12]}", "those that were saved")
    return Verified(
        digest=file_digest(source / DIGESTS),
        tensors=len(tensors),
        bytes=sum(values.nbytes for values in tensors.values()),
        shape_bytes=sum(values.nbytes for name, values in tensors.items() if name.endswith(_SHAPES)),
        planned_bytes=plan.model_bytes[0],
        keys=len(digests.config),
        files=len(digests.files),
        not_checked=tuple(others),
    )
