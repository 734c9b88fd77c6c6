"""The files of weights of a checkpoint, and their tensors."""

from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from gac.checkpoint.header import contradiction
from gac.core.errors import CheckpointError, first_line
from gac.core.untrusted import check_safetensors_header, is_plain_name, read_model_json
from gac.models.loading import UNREADABLE
from gac.runtime.storage.modules import stored_modules

_SHOWN = 80  # letters of a name


def weight_files(directory: Path, full: str = "model.safetensors") -> tuple[tuple[str, ...], str | None]:
    """The files that hold the weights, each once, in order, and the name of the index that names them.

    All lie in this directory, and all are there.

    Args:
        full: what the file is called where there is but one; there is no index then.

    Raises:
        CheckpointError: the index cannot be read, names files elsewhere or of another kind, or a file is missing.
    """
    index = f"{full}.index.json"
    indexed = (directory / index).exists()
    suffix = Path(full).suffix
    named = _named_in(directory, index) if indexed else (full,)
    for name in named:
        if not is_plain_name(name) or not name.endswith(suffix):
            shown = repr(name) if len(name) <= _SHOWN else f"{name[:_SHOWN]!r}... ({len(name):,} characters)"
            raise _wrong(directory, f"{index} names the file {shown}", f"a {suffix[1:]} file of this directory")
        if not (directory / name).is_file():
            raise _wrong(directory, f"{name} is missing", "every file that was saved")
    if full not in named and (directory / full).exists():  # which of the two is read depends on who reads it
        raise _wrong(directory, f"it holds {full} and {index}, each with weights of its own", "one of the two")
    return named, index if indexed else None


def open_tensors(directory: Path, files: tuple[str, ...]) -> dict[str, Tensor]:
    """Every tensor by name, on the CPU; they map the files, so bytes are read where they are used.

    Args:
        files: the first of what ``weight_files`` returns.
    """
    result: dict[str, Tensor] = {}
    for file in files:
        try:
            check_safetensors_header(directory / file)
            with safe_open(directory / file, framework="pt") as opened:
                stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        except UNREADABLE as failure:
            raise _wrong(
                directory, f"{file} cannot be loaded: {first_line(failure)}", "a whole safetensors file"
            ) from failure
        if twice := sorted(result.keys() & stored):
            raise _wrong(directory, f"{twice[0]} is in {file} and in another file", "every tensor once")
        result |= stored
    return result


def check_dtypes(tensors: dict[str, Tensor], model: nn.Module, source: Path) -> None:
    """Refuse what transformers would convert without a word.

    What holds a weight in a storage has the storage's own dtypes. Integers and truth values are what the model itself
    has as such.

    Args:
        model: as it was loaded from the tensors.
    """
    stored = {f"{path}.{name}" for path, module in stored_modules(model).items() for name in module.tensors}
    fixed = {
        name: local.dtype
        for name, local in model.state_dict().items()
        if name in stored or not local.is_floating_point()
    }
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
