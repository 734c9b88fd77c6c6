"""Repair a checkpoint: find its dims, decide what they become, write it again with zeros."""

from collections.abc import Sequence
from pathlib import Path

from gac.checkpoint.directory import check_free, complete_directory
from gac.errors import CheckpointError
from gac.profiling.table import Profile
from gac.repairs.contract import ShapeContract
from gac.repairs.layouts import find_blocks
from gac.repairs.padding import added_bytes, insertions
from gac.repairs.report import Moved, Repaired
from gac.repairs.seams import Block, Dims
from gac.repairs.stored import Source, open_source
from gac.repairs.times import Times, in_table, measured_dims, on_gpu, summed
from gac.repairs.writing import left_out, write
from gac.workloads import Workload

UNALIGNED = 8


def repair_checkpoint(
    directory: Path,
    output: Path,
    contract: ShapeContract,
    profile: Profile,
    why: str,
    workloads: Sequence[Workload],
    *,
    measure: bool,
    allow_pickle: bool,
    overwrite: bool,
) -> Repaired:
    """Zero-pad the dims of a checkpoint and write it to another directory, whole or not at all.

    Args:
        why: why it is this profile.
        measure: time the GEMMs before and after on the current CUDA device.

    Raises:
        CheckpointError: the source cannot be read or contradicts itself, or the output is in use or cannot be written.
        ProfileError: the profile lacks what the contract asks of it, or there is no GPU to measure on.
    """
    check_apart(directory, output)
    check_free(output.resolve(), overwrite)
    source = open_source(directory, allow_pickle=allow_pickle)
    found = find_blocks(source)
    before = {seam.name: seam.dim for block in found.blocks for seam in block.seams}
    after = decide(found.blocks, contract, profile, workloads)
    put_in = insertions(found.blocks, after)
    times = [
        summed("predicted", profile.header.gpu, found.blocks, (before, after), workload, in_table(profile))
        for workload in workloads
    ]
    times += _measured(found.blocks, (before, after), workloads) if measure else []
    held = sum(stored.bytes for stored in source.tensors.values())
    grown = held + sum(added_bytes(source.tensors[name], more) for name, more in put_in.items())
    with complete_directory(output.resolve()) as part:
        write(source, part, found.blocks, after, put_in, grown)
    return Repaired(
        source=str(directory),
        output=str(output),
        layouts=found.layouts,
        contract=contract,
        dims=len(before),
        moved=tuple(_moved(source, found.blocks, after)),
        kept=tuple(name for name, dim in before.items() if after[name] == dim and dim % UNALIGNED),
        bytes_before=held,
        bytes_after=grown,
        times=tuple(times),
        profile=f"{profile.header.gpu}, {profile.digest[:12]}; {why}",
        left_out=left_out(source),
    )


def decide(
    blocks: Sequence[Block], contract: ShapeContract, profile: Profile, workloads: Sequence[Workload]
) -> dict[str, int]:
    """What every dim becomes, by the name of its seam."""
    return {
        seam.name: contract.becomes(
            seam.dim,
            seam.most,
            measured_dims(profile, block, seam, workloads) if contract.measured else {},
        )
        for block in blocks
        for seam in block.seams
    }


def check_apart(directory: Path, output: Path) -> None:
    """Refuse to write over the input, into it, or where it lies within.

    Raises:
        CheckpointError: the two are one directory, or one is in the other.
    """
    source, target = directory.resolve(), output.resolve()
    if source == target:
        raise CheckpointError(
            f"the output {output} is the input", "another directory: the input is never changed", "Choose another one."
        )
    if source in target.parents or target in source.parents:
        raise CheckpointError(
            f"of {directory} and the output {output} one lies in the other", "two places apart", "Choose another one."
        )


def _measured(blocks: Sequence[Block], dims: tuple[Dims, Dims], workloads: Sequence[Workload]) -> list[Times]:
    gpu, look = on_gpu(blocks, dims, workloads)
    return [summed("measured", gpu, blocks, dims, workload, look) for workload in workloads]


def _moved(source: Source, blocks: Sequence[Block], dims: Dims) -> list[Moved]:
    found = []
    for seam in (seam for block in blocks for seam in block.seams):
        if dims[seam.name] != seam.dim:
            alone = insertions([Block((seam,), ())], dims)
            added = sum(added_bytes(source.tensors[name], more) for name, more in alone.items())
            found.append(Moved(seam.name, seam.dim, dims[seam.name], added))
    return found
