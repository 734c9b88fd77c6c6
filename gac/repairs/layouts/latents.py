"""k_proj and v_proj in groups of heads, each of a rank of its own, as PaLU stores them.

A weight's ``VT`` ``(sum of ranks, in)`` writes the latents of all groups, one after the other; ``U.g`` ``(rows of a
group, rank)`` reads those of group g. ``head_wise_ranks`` of ``config.json`` has the ranks (arXiv 2407.21118).
"""

from collections.abc import Iterator
from itertools import accumulate, count, takewhile

from gac.forms.base import Place
from gac.repairs.dense import DenseModel
from gac.repairs.shared_dims import Block, Run, SharedDim
from gac.repairs.weight_files import Source

FIRST, SECOND, STATED = ".VT.weight", ".U.{}.weight", "head_wise_ranks"


def head_groups(source: Source, dense: DenseModel) -> Iterator[Block]:
    """The layout of PaLU."""
    for first in source.tensors:
        if first.endswith(FIRST):
            yield _groups(source, dense, first.removesuffix(FIRST))


def _groups(source: Source, dense: DenseModel, name: str) -> Block:
    seconds = list(takewhile(source.tensors.__contains__, (name + SECOND.format(group) for group in count())))
    first = name + FIRST
    ranks, rows = _ranks(source, dense, name, seconds)
    known = source.config.get(STATED)
    stated = known.get(name) if isinstance(known, dict) else None
    if stated is not None and stated != ranks:
        raise source.contradiction(f"config.json states ranks {stated} for {name}", f"{ranks}, as they are stored")
    starts = list(accumulate(ranks))
    shared = tuple(
        SharedDim(
            f"{name}.U.{group}",
            rank,
            (Place(second, 1, (rank,)), Place(first, 0, (starts[group],))),
            stated=() if stated is None else (STATED, name, group),
        )
        for group, (second, rank) in enumerate(zip(seconds, ranks, strict=True))
    )
    into = source.tensors[first].shape[1]
    latents = Run("linear", (("k", into),), "n", tuple((shared_dim.name, 1) for shared_dim in shared))
    outputs = tuple(Run("linear", (("n", rows),), "k", ((shared_dim.name, 1),)) for shared_dim in shared)
    return Block(shared, (latents, *outputs))


def _ranks(source: Source, dense: DenseModel, name: str, seconds: list[str]) -> tuple[list[int], int]:
    """The rank of every group, and the output features of each."""
    first = source.tensors[name + FIRST].shape
    shapes = [source.tensors[second].shape for second in seconds]
    weight = dense.weights.get(name)
    multiply = (
        all(len(shape) == 2 for shape in (first, *shapes))
        and len({shape[0] for shape in shapes}) == 1
        and sum(shape[1] for shape in shapes) == first[0]
        and (weight is None or (weight.out_features, weight.in_features) == (shapes[0][0] * len(shapes), first[1]))
    )
    if not multiply:
        whole = "one weight" if weight is None else f"{weight.out_features} x {weight.in_features}, the shape of {name}"
        given = " and ".join(" x ".join(map(str, shape)) for shape in shapes) or "no factor"
        raise source.contradiction(
            f"{name}.U of {given} times {name}{FIRST} {' x '.join(map(str, first))}",
            f"factors that multiply to {whole}",
        )
    return [shape[1] for shape in shapes], shapes[0][0]
