"""Repair a checkpoint: find its dims, decide what they become, write it again with zeros."""

import os
from collections.abc import Sequence
from pathlib import Path

from gac.checkpoint.target import check_free, complete_directory
from gac.core.arguments import checked
from gac.core.errors import CheckpointError
from gac.core.workloads import Workload
from gac.plan.plan import ProfileUsed
from gac.profiling.select import select_profile
from gac.profiling.table import Profile
from gac.repairs.adopted import adopted
from gac.repairs.contract import ShapeContract
from gac.repairs.layouts import find_blocks
from gac.repairs.report import Carried, Moved, Repaired
from gac.repairs.shared_dims import Block, added_bytes
from gac.repairs.times import How, Look, in_table, measured_dims, on_gpu, summed
from gac.repairs.weight_files import Source, open_source
from gac.repairs.writing import left_out, write

UNALIGNED = 8


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
) -> Repaired:
    """Zero-pad the dims of a checkpoint that someone compressed to aligned ones, without changing its outputs.

    Args:
        directory: weights factored as SVD-LLM, ASVD or PaLU store them, MLPs with pruned neurons, attentions with
            pruned heads, latent attention, or a checkpoint of GAC; with its ``config.json``. It is only read.
        output: a new or empty directory; the same layout in safetensors, the dims changed where the config states them.
            With pruned heads, which no stock config can state, it becomes a checkpoint of GAC.
        strategy: what a dim becomes: ``minimal`` (the next multiple of 8), ``optimal`` (of 16), ``predefined`` (the
            next head_dim that FlashAttention-2 has a template for, beyond 256 the next multiple of 64), ``tradeoff``
            (a multiple of 8 stays, any other becomes the next multiple of 32 where that adds at most 10 %, else of 16,
            else of 8), ``profile`` (the smallest of the dims from this one on whose measured latency is within 1 % of
            the lowest); or a contract of your own.
        max_overhead: by which fraction a dim may grow at most; one that would grow more stays as it is.
        profile: the latency table for predictions and for ``profile``; None as for ``allocate``.
        workloads: what times are given for, one or more.
        measure: also time the GEMMs before and after, on the GPU of this machine.
        allow_pickle: read ``.bin`` and ``.pt`` files too; with ``weights_only=True``, so as tensors only.
        overwrite: replace a checkpoint of GAC that is at ``output``.

    Returns:
        The dims moved, the bytes added, and the times before and after.

    Raises:
        CheckpointError: the directory cannot be read, holds nothing to repair or contradicts itself, is pickled, or the
            output is in use or the input itself.
        ProfileError: the table lacks what ``profile`` needs, or there is no GPU to measure on.
        GacError: the strategy, the limit or a workload is none.
    """
    contract = strategy if isinstance(strategy, ShapeContract) else ShapeContract.named(strategy)
    contract = contract.limited(max_overhead)
    workloads = (workloads,) if isinstance(workloads, str) else workloads
    parsed = [Workload.parse(workload) for workload in workloads]
    selected = select_profile(profile)
    _check_apart(Path(directory), Path(output))
    check_free(Path(output), overwrite)
    source = open_source(Path(directory), allow_pickle=allow_pickle)
    return _repaired(source, (str(directory), str(output)), contract, selected, parsed, measure=measure)


def _repaired(
    source: Source,
    places: tuple[str, str],
    contract: ShapeContract,
    selected: tuple[Profile, ProfileUsed],
    workloads: Sequence[Workload],
    *,
    measure: bool,
) -> Repaired:
    """Decide the dims, look their times up and write the padded checkpoint from the first place to the second."""
    table, used = selected
    directory, output = places
    found = find_blocks(source)
    blocks = [block for some in found.values() for block in some]
    shared = [one for block in blocks for one in block.shared]
    before = {one.name: one.dim for one in shared}
    after = decide(blocks, contract, table, workloads)
    looks: dict[How, tuple[str, Look]] = {"predicted": (table.header.gpu, in_table(table))}
    if measure:
        looks["measured"] = on_gpu(blocks, (before, after), workloads)
    times = tuple(
        summed(how, gpu, blocks, (before, after), workload, look)
        for how, (gpu, look) in looks.items()
        for workload in workloads
    )
    moved = tuple(
        Moved(one.name, one.dim, after[one.name], added_bytes(source, [one], after))
        for one in shared
        if after[one.name] != one.dim
    )
    padded = [one for one in shared if not one.carried]
    carried = tuple(Carried(one.name, one.form, one.dim) for one in shared if one.form and one.carried)
    held = sum(tensor.nbytes for tensor in source.tensors.values())
    grown = held + added_bytes(source, shared, after)
    with complete_directory(Path(output)) as part:
        write(source, part, shared, after, grown, adopted(source, shared, after, used))
    return Repaired(
        source=directory,
        output=output,
        layouts=tuple(found),
        contract=contract,
        dims=len(padded),
        moved=moved,
        carried=carried,
        kept=tuple(one.name for one in padded if after[one.name] == one.dim and one.dim % UNALIGNED),
        bytes_before=held,
        bytes_after=grown,
        times=times,
        profile=f"{table.header.gpu}, {table.digest[:12]}; {used.note}",
        left_out=left_out(source),
    )


def decide(
    blocks: Sequence[Block], contract: ShapeContract, profile: Profile, workloads: Sequence[Workload]
) -> dict[str, int]:
    """What every dim becomes, by the name of its shared dim."""
    becomes = {}
    for block in blocks:
        for one in block.shared:
            if one.carried:
                becomes[one.name] = one.dim
                continue
            latency = measured_dims(profile, block, one, workloads) if contract.measured else {}
            becomes[one.name] = contract.becomes(one.dim, one.most, latency)
    return becomes


def _check_apart(directory: Path, output: Path) -> None:
    """Refuse an output that is the input, inside it, or around it."""
    source, target = (Path(os.path.realpath(path)) for path in (directory, output))
    if source == target:
        raise CheckpointError(
            f"the output {output} is the input", "another directory: the input is never changed", "Choose another one."
        )
    if source in target.parents or target in source.parents:
        raise CheckpointError(
            f"of {directory} and the output {output} one is inside the other",
            "two separate directories",
            "Choose another one.",
        )
