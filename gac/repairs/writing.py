"""Write the repaired checkpoint: the same layout, in safetensors, whole or absent."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from gac.checkpoint.card import model_card
from gac.checkpoint.digests import write_digests
from gac.checkpoint.files import read_plan, write_header
from gac.core.errors import CheckpointError
from gac.core.io import open_to_umask
from gac.core.untrusted import read_model_json
from gac.forms.tensors import with_zeros
from gac.models.loading import is_checkpoint
from gac.repairs.adopted import Adopted
from gac.repairs.layouts.planned import padded_plan
from gac.repairs.shared_dims import Dims, Insertions, SharedDim, insertions, with_dims
from gac.repairs.weight_files import PICKLED, PICKLES, SAFE, Source
from gac.runtime.contract import DIGESTS
from gac.runtime.model import CODE, write_code

_LEFT_OUT = (*PICKLES, ".pkl", ".ckpt", ".py")


def write(
    source: Source, part: Path, shared: Sequence[SharedDim], dims: Dims, bytes_: int, adopted: Adopted | None
) -> None:
    """Fill the empty directory ``part``.

    Args:
        dims: the new ones, by the shared dim's name.
        bytes_: of all tensors then.
        adopted: what makes it a checkpoint of GAC where the source is none; None: it stays none.
    """
    put_in = insertions(shared, dims)
    _copy_rest(source, part)
    for file in source.files:
        _write_file(source, file, part, put_in)
    if source.index is not None:
        _write_index(source, source.index, part, bytes_)
    _write_config(source, part, shared, dims, adopted)
    plan = None if adopted is None else adopted.plan
    if plan is None and not is_checkpoint(source.directory):
        return
    if plan is None and put_in:
        plan = padded_plan(read_plan(source.directory), dims)
    if plan is not None:
        plan.save(part / "plan.json")
        write_header(part, plan)
        (part / "README.md").write_text(model_card(plan), encoding="utf-8")
    write_code(part)
    write_digests(part)


def left_out(source: Source) -> tuple[str, ...]:
    """Pickles and code beside the weights, which are not copied; GAC's own code is written anew."""
    own = {*source.files, *({CODE} if is_checkpoint(source.directory) else ())}
    return tuple(sorted(path.name for path in source.directory.iterdir() if _runs(path) and path.name not in own))


def _runs(path: Path) -> bool:
    return path.suffix in _LEFT_OUT


def _copy_rest(source: Source, part: Path) -> None:
    """Everything but weights, their index, the config, digests, pickles and code."""
    done = {*source.files, source.index, "config.json", DIGESTS}
    for path in source.directory.iterdir():
        if path.name in done or _runs(path):
            continue
        if path.is_dir():
            patterns = shutil.ignore_patterns(*(f"*{suffix}" for suffix in _LEFT_OUT))
            shutil.copytree(path, part / path.name, ignore=patterns)
        else:
            shutil.copyfile(path, part / path.name)


def _safe_name(source: Source, file: str) -> str:
    """What a file of weights is called when it is a safetensors file."""
    if not source.pickled:
        return file
    if source.index is None:
        return SAFE
    return file.replace(Path(PICKLED).stem, Path(SAFE).stem, 1).removesuffix(".bin") + ".safetensors"


def _write_file(source: Source, file: str, part: Path, put_in: Insertions) -> None:
    target = part / _safe_name(source, file)
    tensors = source.by_file[file]
    if not source.pickled and put_in.keys().isdisjoint(tensors):
        shutil.copyfile(source.directory / file, target)
        return
    if source.pickled:  # where tied weights share their memory, which safetensors refuses
        tensors = {name: values.clone().contiguous() for name, values in tensors.items()}
    save_file(
        {name: with_zeros(values, put_in.get(name, ())) for name, values in tensors.items()},
        target,
        metadata={"format": "pt"},
    )
    open_to_umask(target)


def _write_index(source: Source, name: str, part: Path, bytes_: int) -> None:
    index = read_model_json(source.directory / name, "a weight_map from weights to files", CheckpointError)
    metadata = index.get("metadata")
    index["metadata"] = (metadata if isinstance(metadata, dict) else {}) | {"total_size": bytes_}
    index["weight_map"] = {
        tensor: _safe_name(source, file) for file, tensors in source.by_file.items() for tensor in tensors
    }
    (part / f"{SAFE}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(source: Source, part: Path, shared: Sequence[SharedDim], dims: Dims, adopted: Adopted | None) -> None:
    """The config with the dims that it states; copied where none of them moved."""
    if adopted is None and not any(one.stated and dims[one.name] != one.dim for one in shared):
        shutil.copyfile(source.directory / "config.json", part / "config.json")
        return
    config = adopted.config if adopted else with_dims(source.config, shared, dims)
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
