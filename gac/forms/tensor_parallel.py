"""Tensor parallelism as a rewrite of operations: the part of every matrix on one GPU, and the collectives.

A form says how each of its matrices is divided (``Latency.splits``); ``gac.runtime.parallel.division`` runs them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import lcm

from gac.core.errors import GacError
from gac.core.operations import Operation, all_gather, all_reduce
from gac.forms.base import Form, Split
from gac.models.sites import Site, Weight
from gac.schemes import Scheme

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
"""Operators of several GPUs, timed in 16-bit numbers whatever the scheme of the weights."""

MOST_GPUS = 64
_WORD = 32  # bits of a word of packed numbers


def split_operations(form: Form, weight: Weight, dim: int, rows: int, gpus: int) -> tuple[Operation, ...]:
    """Operations of each GPU for ``rows`` tokens, in order: its part of every GEMM, and the collective that follows.

    Sizes that cannot be divided are rounded down, see ``divides``. Nothing runs where a GEMM has a size of 0.
    """
    pairs = _parts(form, weight, dim, rows, gpus)
    return tuple(operation for pair in pairs for operation in pair if operation is not None)


def split_gemms(form: Form, weight: Weight, dim: int, rows: int, gpus: int) -> tuple[Operation, ...]:
    if gpus == 1:
        return form.latency.gemms(weight, dim, rows)
    return tuple(gemm for gemm, _ in _parts(form, weight, dim, rows, gpus))


def split_fused(form: Form, weight: Weight, dim: int, gpus: int) -> int:
    """Output features that a GPU's part adds to one GEMM over all weights with the same input."""
    gemms = split_gemms(form, weight, dim, 1, gpus)
    return gemms[0].axes["n"] if gemms else 0


def split_matrices(form: Form, weight: Weight, dim: int, gpus: int) -> tuple[tuple[int, int], ...]:
    divided = zip(form.latency.matrices(weight, dim), _divided(form, weight, dim, 1), strict=True)
    return tuple(
        (rows, columns // gpus) if split == "rowwise" else (rows // _count(weight, split, gpus), columns)
        for (rows, columns), (_, split) in divided
    )


def moved_axes(form: Form, weight: Weight) -> list[str | None]:
    """The axis of each GEMM that the dim sets; None where it sets none."""
    smaller, larger = (form.latency.gemms(weight, dim, 1) for dim in (1, 2))
    pairs = (zip(first.shape, second.shape, strict=True) for first, second in zip(smaller, larger, strict=True))
    return [next((name for (name, size), (_, more) in shapes if size != more), None) for shapes in pairs]


def moves_parts(form: Form, weight: Weight, gpus: int) -> bool:
    """True if the axis set by the dim is sharded (rank of q: yes; of o: no)."""
    full, parts = form.latency.gemms(weight, gpus, 1), split_gemms(form, weight, gpus, 1, gpus)
    moved = zip(full, parts, moved_axes(form, weight), strict=True)
    return any(axis is not None and gemm.axes[axis] != part.axes[axis] for gemm, part, axis in moved)


def divides(form: Form, weight: Weight, dim: int, scheme: Scheme, gpus: int) -> bool:
    """True if every GPU can have an equal part: of heads, and of rows or columns of every block.

    A scheme's groups of columns and its packed words of 32 bits are never cut, and it has to support the GEMMs.
    """
    if gpus == 1:
        return True
    if form.dim_counts_units and dim % gpus:
        return False
    divided = _divided(form, weight, dim, 1)
    for gemm, split in divided:
        blocks = weight.blocks if split == "colwise" else 1
        if gemm.axes[_axis(gemm, split)] // blocks % _count(weight, split, gpus):
            return False
    matrices = zip(form.latency.matrices(weight, dim), divided, strict=True)
    if any(_cuts(scheme, weight, *matrix, split, gpus) for matrix, (_, split) in matrices):
        return False
    return scheme.shape_requirement is None or all(map(scheme.supports, split_gemms(form, weight, dim, 1, gpus)))


def check_splits(sites: Sequence[Site], gpus: int) -> None:
    """Refuse a number of GPUs over which not every weight can be divided evenly.

    Heads and neurons are kept whole. Where there are fewer key-value heads than GPUs, several GPUs have the same one.
    """
    counts = {units: count for site in sites for units, count in _counts(site)}
    wrong = next((units for units in counts if not _even(units, counts, gpus)), None)
    if wrong is None:
        return
    able = [str(count) for count in range(1, MOST_GPUS + 1) if all(_even(units, counts, count) for units in counts)]
    raise GacError(
        f"tensor_parallel={gpus} for a model with {counts[wrong]:,} {wrong}",
        f"a number of GPUs that divides them: {', '.join(able)}",
        "Split over as many, and run copies of the model on the others."
        if len(able) > 1
        else "Plan for one GPU (tensor_parallel=1).",
    )


_KEYS, _QUERIES = "key-value heads", "query heads"


def _even(units: str, counts: dict[str, int], gpus: int) -> bool:
    shared = units == _KEYS and gpus % counts[units] == 0 and counts.get(_QUERIES, 0) % gpus == 0
    return shared or counts[units] % gpus == 0


def _counts(site: Site) -> Iterator[tuple[str, int]]:
    for weight in site.weights:
        name = weight.name.rpartition(".")[2]
        if weight.queries:
            yield f"weight that writes queries, keys and values together ({name})", 1
        elif "in" in (weight.neurons, weight.values) and not weight.to_residual:
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
        elif not weight.scores:  # queries have the heads of the weight behind them
            out = weight.split == "out"
            yield f"{'outputs' if out else 'inputs'} of {name}", weight.out_features if out else weight.in_features


def _parts(form: Form, weight: Weight, dim: int, rows: int, gpus: int) -> list[tuple[Operation, Operation | None]]:
    if any(size == 0 for gemm in form.latency.gemms(weight, dim, rows) for _, size in gemm.shape):
        return []
    parts: list[tuple[Operation, Operation | None]] = []
    for gemm, split in _divided(form, weight, dim, rows):
        axis, axes = _axis(gemm, split), gemm.axes
        part = replace(gemm, shape=tuple((axes | {axis: axes[axis] // _count(weight, split, gpus)}).items()))
        collective = _COLLECTIVE_AFTER.get(split)
        parts.append((part, collective(gpus, axes["m"], axes["n"]) if collective else None))
    return parts


_COLLECTIVE_AFTER: Mapping[Split, Callable[[int, int, int], Operation]] = {
    "rowwise": all_reduce,
    "colwise_gather": all_gather,
}


def _axis(gemm: Operation, split: Split) -> str:
    # Blocks are never cut.
    return "k" if split == "rowwise" else "b" if "b" in gemm.axes else "n"


def _count(weight: Weight, split: Split, gpus: int) -> int:
    # Outputs are divided into no more parts than there are key-value heads.
    return weight.parts(gpus) if split == "colwise" else gpus


def _divided(form: Form, weight: Weight, dim: int, rows: int) -> list[tuple[Operation, Split]]:
    gemms, splits = form.latency.gemms(weight, dim, rows), form.latency.splits(weight)
    if len(splits) != len(gemms):
        raise GacError(
            f"form {form.name} of {weight.name}, which says how {len(splits)} of its {len(gemms)} matrices are divided",
            "one way a matrix",
            "Define Latency.splits, or plan for one GPU without this form.",
        )
    return list(zip(gemms, splits, strict=True))


def _cuts(scheme: Scheme, weight: Weight, rows: int, columns: int, split: Split, gpus: int) -> bool:
    """True if a part would begin inside a group of columns, a block of rows or a word of packed numbers."""
    if scheme.storage is None:
        return False
    blocks = weight.blocks if split == "colwise" else 1
    part = columns // gpus if split == "rowwise" else rows // blocks // _count(weight, split, gpus)
    grouped = scheme.group is not None and scheme.group < columns
    size = scheme.height if split != "rowwise" else (scheme.group or 1) if grouped else 1
    return part % lcm(lcm(scheme.bits, _WORD) // scheme.bits, size) != 0
