"""Repair a checkpoint: find its dims, choose the padded ones, and write it again with zeros, in safetensors."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file

from gac.checkpoint.card import model_card
from gac.checkpoint.files import described, plan_text, read_config, read_plan
from gac.checkpoint.header import header_of
from gac.checkpoint.target import check_free, complete_directory
from gac.checkpoint.verify import write_digests
from gac.core.arguments import checked
from gac.core.errors import CheckpointError
from gac.core.io import open_to_umask
from gac.core.untrusted import read_model_json
from gac.core.workloads import Workload
from gac.forms.tensors import with_zeros
from gac.plan.evidence import ProfileUsed
from gac.plan.plan import Plan
from gac.profiling.select import select_profile
from gac.profiling.table import Profile
from gac.runtime.contract import DIGESTS
from gac.runtime.model import CODE, write_code
from gac_extensions.repairs.contract import ShapeContract
from gac_extensions.repairs.dims import Dims, Insertions, SharedDim, added_bytes, insertions, with_dims
from gac_extensions.repairs.layouts import find_dims
from gac_extensions.repairs.planned import adopt, padded_plan, planned_dims
from gac_extensions.repairs.report import PaddedDim, RepairResult, UnpaddedDim
from gac_extensions.repairs.times import How, Latency, in_table, measured_dims, on_gpu, total_times
from gac_extensions.repairs.weight_files import PICKLED, PICKLES, SAFE, Source, open_source

UNALIGNED = 8
_NOT_COPIED = (*PICKLES, ".pkl", ".ckpt", ".py")


@checked
def repair(
    directory: str | Path,
    output: str | Path,
    *,
    strategy: str | ShapeContract = "minimal",
    max_overhead: float | None = None,
    profile: Profile | str | Path | None = None,
    workloads: str | Sequence[str] = ("prefill:1x1024", "decode:1@1024"),
    measure: bool = False,
    allow_pickle: bool = False,
    overwrite: bool = False,
) -> RepairResult:
    """Zero-pad the dims of a compressed checkpoint to aligned ones, without changing its outputs.

    Args:
        directory: weights factored as SVD-LLM, ASVD or PaLU store them, MLPs with pruned neurons, attentions with
            pruned heads, latent attention, or a checkpoint of GAC; with its ``config.json``. It is only read.
        output: a new or empty directory; the same layout in safetensors, with the new dims in the config. With pruned
            heads, which no stock config can state, it becomes a checkpoint of GAC.
        strategy: the padded dim: ``minimal`` (the next multiple of 8), ``optimal`` (of 16), ``predefined`` (the next
            head_dim with a template of FlashAttention-2, beyond 256 the next multiple of 64), ``tradeoff`` (a multiple
            of 8 stays, any other becomes the next multiple of 32 if that adds at most 10 %, else of 16, else of 8),
            ``profile`` (the smallest dim from this one on with a measured latency within 1 % of the lowest); or a
            contract of your own.
        max_overhead: maximum fraction by which a dim may grow; one that would grow more stays.
        profile: the latency table for predictions and for ``profile``; None as for ``allocate``.
        workloads: those of the latencies in the result.
        measure: also time the GEMMs before and after, on the GPU of this machine.
        allow_pickle: read ``.bin`` and ``.pt`` files too, with ``weights_only=True``.
        overwrite: replace a checkpoint of GAC at ``output``.

    Raises:
        CheckpointError: the directory cannot be read, has nothing to repair, contradicts itself or is pickled, or the
            output is in use.
        ProfileError: the table lacks what ``profile`` needs, or there is no GPU to measure on.
        GacError: the strategy, the limit or a workload is invalid.
    """
    contract = strategy if isinstance(strategy, ShapeContract) else ShapeContract.named(strategy)
    if max_overhead is not None:
        contract = replace(contract, most_overhead=max_overhead)
    parsed = [Workload.parse(name) for name in ((workloads,) if isinstance(workloads, str) else workloads)]
    table, used = select_profile(profile)
    _check_separate(Path(directory), Path(output))
    check_free(Path(output), overwrite)
    source = open_source(Path(directory), allow_pickle=allow_pickle)
    layouts = {"GAC": tuple(planned_dims(source))} if source.has_plan else find_dims(source)
    shared = [dim for dims in layouts.values() for dim in dims]
    runs = [run for dim in shared for run in dim.runs]
    before, after = {dim.name: dim.dim for dim in shared}, decide(shared, contract, table, parsed)
    latencies: dict[How, tuple[str, Latency]] = {"predicted": (table.header.gpu, in_table(table))}
    if measure:
        latencies["measured"] = on_gpu(runs, (before, after), parsed)
    size = sum(tensor.nbytes for tensor in source.tensors.values())
    padded_size = size + added_bytes(source, shared, after)
    with complete_directory(Path(output)) as part:
        left_out = _write(source, part, shared, after, padded_size, used)
    padding = [dim for dim in shared if not dim.fixed]
    moved = [dim for dim in padding if after[dim.name] != dim.dim]
    return RepairResult(
        source=str(directory),
        output=str(output),
        layouts=tuple(layouts),
        contract=contract,
        dims=len(padding),
        moved=tuple(PaddedDim(dim.name, dim.dim, after[dim.name], added_bytes(source, [dim], after)) for dim in moved),
        carried=tuple(UnpaddedDim(dim.name, dim.form, dim.dim) for dim in shared if dim.form and dim.fixed),
        kept=tuple(dim.name for dim in padding if after[dim.name] == dim.dim and dim.dim % UNALIGNED),
        bytes_before=size,
        bytes_after=padded_size,
        times=tuple(
            total_times(how, gpu, runs, (before, after), workload, latency)
            for how, (gpu, latency) in latencies.items()
            for workload in parsed
        ),
        profile=f"{table.header.gpu}, {table.digest[:12]}; {used.note}",
        left_out=left_out,
    )


def decide(
    shared: Sequence[SharedDim], contract: ShapeContract, profile: Profile, workloads: Sequence[Workload]
) -> dict[str, int]:
    padded = {dim.name: dim.dim for dim in shared}
    for dim in shared:
        if not dim.fixed:
            latency = measured_dims(profile, dim, workloads) if contract.measured else {}
            padded[dim.name] = contract.becomes(dim.dim, dim.most, latency)
    return padded


def _check_separate(directory: Path, output: Path) -> None:
    source, target = (Path(os.path.realpath(path)) for path in (directory, output))
    if source == target or source in target.parents or target in source.parents:
        problem = f"the output {output} is the input {directory}, or one is inside the other"
        raise CheckpointError(problem, "two separate directories: the input is never changed", "Choose another one.")


def _write(
    source: Source, part: Path, shared: Sequence[SharedDim], dims: Dims, size: int, profile: ProfileUsed
) -> tuple[str, ...]:
    """Fill the empty directory ``part`` with tensors of ``size`` bytes in total; returns what was not copied."""
    adopted = None if source.has_plan else adopt(source, shared, dims, profile)
    plan, config = adopted or (None, with_dims(source.config, shared, dims))
    zeros = insertions(shared, dims)
    left_out = _copy_rest(source, part)
    for file in source.files:
        _write_tensors(source, file, part, zeros)
    if source.index is not None:
        _write_index(source, source.index, part, size)
    if config == source.config:
        shutil.copyfile(source.directory / "config.json", part / "config.json")
    else:
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if source.has_plan and zeros:
        plan = padded_plan(read_plan(source.directory), dims)
    if plan is not None:
        plan.save(part / "plan.json")
        _write_header(part, plan)
        (part / "README.md").write_text(model_card(plan), encoding="utf-8")
    if plan is not None or source.has_plan:
        write_code(part)
        write_digests(part)
    return left_out


def _write_header(part: Path, plan: Plan) -> None:
    config = read_config(part)
    config["gac"] = header_of(plan, described(config, part), plan_text(part))
    (part / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_rest(source: Source, part: Path) -> tuple[str, ...]:
    """Copy all but pickles and code, which are returned, and what is written again."""
    written = {*source.files, source.index, "config.json", DIGESTS, *([CODE] if source.has_plan else ())}
    unsafe, left_out = shutil.ignore_patterns(*(f"*{suffix}" for suffix in _NOT_COPIED)), []
    for path in sorted(source.directory.iterdir()):
        if path.name in written:
            continue
        if path.suffix in _NOT_COPIED:
            left_out.append(path.name)
        elif path.is_dir():
            shutil.copytree(path, part / path.name, ignore=unsafe)
        else:
            shutil.copyfile(path, part / path.name)
    return tuple(left_out)


def _safe_name(source: Source, file: str) -> str:
    if not source.pickled:
        return file
    if source.index is None:
        return SAFE
    return file.replace(Path(PICKLED).stem, Path(SAFE).stem, 1).removesuffix(".bin") + ".safetensors"


def _write_tensors(source: Source, file: str, part: Path, zeros: Insertions) -> None:
    target = part / _safe_name(source, file)
    tensors = source.by_file[file]
    if not source.pickled and zeros.keys().isdisjoint(tensors):
        shutil.copyfile(source.directory / file, target)
        return
    padded = {name: with_zeros(values, zeros.get(name, ())) for name, values in tensors.items()}
    if source.pickled:  # tied weights share their memory there, which safetensors refuses
        padded = {name: values.clone().contiguous() for name, values in padded.items()}
    save_file(padded, target, metadata={"format": "pt"})
    open_to_umask(target)


def _write_index(source: Source, name: str, part: Path, size: int) -> None:
    index = read_model_json(source.directory / name, "a weight_map from weights to files", CheckpointError)
    metadata = index.get("metadata")
    index["metadata"] = (metadata if isinstance(metadata, dict) else {}) | {"total_size": size}
    index["weight_map"] = {
        tensor: _safe_name(source, file) for file, tensors in source.by_file.items() for tensor in tensors
    }
    (part / f"{SAFE}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
