"""Tensor parallelism as a rewrite of what runs: the part of every matrix that one GPU has, and the collectives.

A form says how each of its matrices is divided (``Form.splits``). What runs split is in ``gac.runtime.parallel``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm

from gac.core.errors import GacError
from gac.core.operations import Operation, all_gather, all_reduce
from gac.forms.base import Form, Split
from gac.models.sites import Site, Weight
from gac.schemes import Scheme

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
"""The operators that several GPUs run together, timed in 16-bit numbers whatever weights are stored in."""

MOST_GPUS = 64
_WORD = 32  # bits that numbers are packed into


def split_operations(form: Form, weight: Weight, dim: int, rows: int, gpus: int) -> tuple[Operation, ...]:
    """What each of the GPUs runs for ``rows`` tokens, in order: its part of every GEMM, and what follows that.

    Sizes that cannot be divided are rounded down, see ``divides``. Nothing runs where a GEMM has a size of 0.

    Raises:
        GacError: the form does not say how each of its matrices is divided.
    """
    return tuple(one for pair in _parts(form, weight, dim, rows, gpus) for one in pair if one is not None)


def split_gemms(form: Form, weight: Weight, dim: int, rows: int, gpus: int) -> tuple[Operation, ...]:
    """The GEMMs among them; on one GPU those of the form."""
    if gpus == 1:
        return form.gemms(weight, dim, rows)
    return tuple(gemm for gemm, _ in _parts(form, weight, dim, rows, gpus))


def split_fused(form: Form, weight: Weight, dim: int, gpus: int) -> int:
    """Output features that a GPU's part adds to one GEMM over all weights that read the same input."""
    if gpus == 1:
        return form.fused(weight, dim)
    gemms = split_gemms(form, weight, dim, 1, gpus)
    return gemms[0].axes["n"] if gemms else 0


def split_matrices(form: Form, weight: Weight, dim: int, gpus: int) -> tuple[tuple[int, int], ...]:
    """Rows and columns of what each GPU holds of the form's matrices."""
    matrices = form.matrices(weight, dim)
    divided = zip(matrices, _splits(form, weight, len(matrices)), strict=True)
    return tuple(
        (rows, columns // gpus) if split == "rowwise" else (rows // _count(weight, split, gpus), columns)
        for (rows, columns), split in divided
    )


def moved_axes(form: Form, weight: Weight) -> list[str | None]:
    """The axis of each GEMM that the dim moves; None where it moves none."""
    smaller, larger = (form.gemms(weight, dim, 1) for dim in (1, 2))
    pairs = (zip(one.shape, other.shape, strict=True) for one, other in zip(smaller, larger, strict=True))
    return [next((name for (name, size), (_, more) in shapes if size != more), None) for shapes in pairs]


def moves_parts(form: Form, weight: Weight, gpus: int) -> bool:
    """Whether what the dim moves is divided: the rank of a pair is of q, and is not of o."""
    whole, parts = form.gemms(weight, gpus, 1), split_gemms(form, weight, gpus, 1, gpus)
    moved = zip(whole, parts, moved_axes(form, weight), strict=True)
    return any(axis is not None and one.axes[axis] != part.axes[axis] for one, part, axis in moved)


def divides(form: Form, weight: Weight, dim: int, scheme: Scheme, gpus: int) -> bool:
    """Whether every GPU can have an equal part: of heads, of rows or columns of every block, in what the scheme allows.

    It keeps whole groups of columns with one scale, and words of 32 bits that numbers are packed into. The parts have
    to be GEMMs that it runs, too.
    """
    if gpus == 1:
        return True
    if form.pieces and dim % gpus:
        return False
    gemms = form.gemms(weight, dim, 1)
    splits = _splits(form, weight, len(gemms))
    blocks = (_block_of(gemm, weight, split) for gemm, split in zip(gemms, splits, strict=True))
    counts = (_count(weight, split, gpus) for split in splits)
    if any(size % count for size, count in zip(blocks, counts, strict=True)):
        return False
    matrices = zip(form.matrices(weight, dim), splits, strict=True)
    if not all(_keeps_whole(scheme, weight, *matrix, split, gpus) for matrix, split in matrices):
        return False
    return scheme.needs is None or all(map(scheme.runs, split_gemms(form, weight, dim, 1, gpus)))


def check_splits(sites: Sequence[Site], gpus: int) -> None:
    """Refuse a number of GPUs over which not every weight can be divided evenly.

    Heads and neurons are kept whole. Where there are fewer key-value heads than GPUs, several GPUs have the same one.

    Raises:
        GacError: names what cannot be divided, and the numbers of GPUs that divide it all.
    """
    if gpus == 1:
        return
    counts = {what: count for site in sites for what, count in _counts(site)}
    wrong = next((what for what in counts if not _even(what, counts, gpus)), None)
    if wrong is None:
        return
    able = [str(count) for count in range(1, MOST_GPUS + 1) if all(_even(what, counts, count) for what in counts)]
    raise GacError(
        f"tensor_parallel={gpus} for a model with {counts[wrong]:,} {wrong}",
        f"a number of GPUs that divides them: {', '.join(able)}",
        "Split over as many, and run copies of the model on the others."
        if len(able) > 1
        else "Plan for one GPU (tensor_parallel=1).",
    )


_KEYS, _QUERIES = "key-value heads", "query heads"


def _even(what: str, counts: dict[str, int], gpus: int) -> bool:
    shared = what == _KEYS and gpus % counts[what] == 0 and counts.get(_QUERIES, 0) % gpus == 0
    return shared or counts[what] % gpus == 0


def _counts(site: Site) -> Iterator[tuple[str, int]]:
    """What has to be divided evenly, in words."""
    for weight in site.weights:
        name = weight.name.rpartition(".")[2]
        if weight.queries:
            yield f"weight that writes queries, keys and values together ({name})", 1
        elif "in" in (weight.neurons, weight.values) and not weight.writes:
            yield f"weight that does not write to the residual stream ({name})", 1
        elif weight.cached and weight.heads and not weight.groups:
            yield f"attention that computes with all heads at once ({name})", 1
        elif weight.cached and weight.heads:
            yield _KEYS, weight.heads
        elif weight.values == "in" and weight.heads:
            yield _QUERIES, weight.heads
        elif weight.neurons:
            side = weight.out_features if weight.neurons == "out" else weight.in_features
            yield "neurons of an MLP", side // weight.blocks
        elif not weight.scores:  # queries have the heads that the weight behind them reads
            out = weight.split == "out"
            yield f"{'outputs' if out else 'inputs'} of {name}", weight.out_features if out else weight.in_features


def _parts(form: Form, weight: Weight, dim: int, rows: int, gpus: int) -> list[tuple[Operation, Operation | None]]:
    """Every GEMM as a GPU runs it, and the collective that follows it."""
    gemms = form.gemms(weight, dim, rows)
    if any(size == 0 for gemm in gemms for _, size in gemm.shape):
        return []
    splits = _splits(form, weight, len(gemms))
    return [_part(gemm, weight, split, gpus) for gemm, split in zip(gemms, splits, strict=True)]


def _part(gemm: Operation, weight: Weight, split: Split, gpus: int) -> tuple[Operation, Operation | None]:
    axis, axes = _axis(gemm, split), gemm.axes
    size = axes[axis] // _count(weight, split, gpus)
    part = replace(gemm, shape=tuple((name, size if name == axis else own) for name, own in gemm.shape))
    if split == "rowwise":
        return part, all_reduce(gpus, axes["m"], axes["n"])
    return part, all_gather(gpus, axes["m"], axes["n"]) if split == "colwise_gather" else None


def _axis(gemm: Operation, split: Split) -> str:
    """The axis that is divided: blocks by themselves, where there are any."""
    return "k" if split == "rowwise" else "b" if "b" in gemm.axes else "n"


def _count(weight: Weight, split: Split, gpus: int) -> int:
    """Into how many parts: a weight's own outputs only into as many as it has key-value heads."""
    return weight.parts(gpus) if split == "colwise" else gpus


def _block_of(gemm: Operation, weight: Weight, split: Split) -> int:
    """The size that is divided, of one of the blocks that a weight writes one after the other."""
    return gemm.axes[_axis(gemm, split)] // (weight.blocks if split == "colwise" else 1)


def _splits(form: Form, weight: Weight, count: int) -> tuple[Split, ...]:
    splits = form.splits(weight)
    if len(splits) != count:
        given = f"form {form.name} of {weight.name}, which says how {len(splits)} of its {count} matrices are divided"
        raise GacError(given, "one way a matrix", "Define Form.splits, or plan for one GPU without this form.")
    return splits


def _keeps_whole(scheme: Scheme, weight: Weight, rows: int, columns: int, split: Split, gpus: int) -> bool:
    """Whether no part begins inside a group of columns or inside a word of packed numbers."""
    if scheme.storage is None:
        return True
    blocks = weight.blocks if split == "colwise" else 1
    part = columns // gpus if split == "rowwise" else rows // blocks // _count(weight, split, gpus)
    grouped = split == "rowwise" and scheme.group is not None and scheme.group < columns
    numbers = lcm(scheme.bits, _WORD) // scheme.bits
    return part % lcm(numbers, (scheme.group or 1) if grouped else 1) == 0
