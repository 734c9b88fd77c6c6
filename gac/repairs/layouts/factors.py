"""Weights stored as factors: pairs as SVD-LLM and ASVD name them, and the head groups of PaLU.

PaLU's k_proj and v_proj are in groups of heads, each of a rank of its own. A weight's ``VT`` ``(sum of ranks, in)``
writes the latents of all groups, one after the other; ``U.g`` ``(rows of a group, rank)`` reads those of group g.
``head_wise_ranks`` of ``config.json`` has the ranks (arXiv 2407.21118).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count, takewhile

from gac.forms import form_named
from gac.forms.base import Place
from gac.models.weights import Weight
from gac.repairs.dense import DenseModel
from gac.repairs.shared_dims import Block, Run, SharedDim, run_of
from gac.repairs.weight_files import Source

_LOW_RANK = form_named("low_rank")


@dataclass(frozen=True)
class Peer:
    """How a compressor names the factors of a weight: B ``(out, rank)`` is ``second``, A ``(rank, in)`` is ``first``.

    Attributes:
        second, first: how the names of the tensors end.
        weights: what the weight may be called, with what stands before these endings as ``{}``.
        stated: the key of ``config.json`` that holds the ranks by the weight's name; None where none does.
    """

    name: str
    second: str
    first: str
    weights: tuple[str, ...] = ("{}",)
    stated: str | None = None


PEERS = (
    Peer("SVD-LLM", "_u_proj.weight", "_v_proj.weight", weights=("{}_proj", "{}")),
    Peer("ASVD", ".ALinear.weight", ".BLinear.weight", stated="truncation_ranks"),
)


def factored_pairs(peer: Peer) -> Callable[[Source, DenseModel], Iterator[Block]]:
    """The layout of a peer."""

    def read(source: Source, dense: DenseModel) -> Iterator[Block]:
        for second in source.tensors:
            if second.endswith(peer.second):
                yield _pair(source, dense, peer, second.removesuffix(peer.second))

    return read


def _pair(source: Source, dense: DenseModel, peer: Peer, stem: str) -> Block:
    second, first = stem + peer.second, stem + peer.first
    if first not in source.tensors:
        raise source.contradiction(f"{second} without {first}", f"both factors, as {peer.name} stores them")
    called = [name.format(stem) for name in peer.weights]
    stated = next((dense.weights[name] for name in called if name in dense.weights), None)
    name = called[0] if stated is None else stated.name
    (out, rank), (inner, into) = (source.matrix(tensor) for tensor in (second, first))
    whole = (out, into) if stated is None else (stated.out_features, stated.in_features)
    if rank != inner or (out, into) != whole:
        raise source.contradiction(
            f"{second} {out} x {rank} times {first} {inner} x {into}",
            f"factors that multiply to {whole[0]} x {whole[1]}, the shape of {name}",
        )
    path = _stated_at(source, peer, name, rank)
    shared_dim = SharedDim(name, rank, (Place(second, 1, (rank,)), Place(first, 0, (rank,))), stated=path)
    weight = Weight(name, out, into)
    return Block((shared_dim,), (run_of(name, lambda dim: _LOW_RANK.operation(weight, dim, 1)),))


def _stated_at(source: Source, peer: Peer, name: str, rank: int) -> tuple[str, ...]:
    """Where the config states the rank; checks that it is the stored one."""
    ranks = source.config.get(peer.stated) if peer.stated else None
    if peer.stated is None or not isinstance(ranks, dict) or name not in ranks:
        return ()
    if ranks[name] != rank:
        raise source.contradiction(f"config.json states rank {ranks[name]} for {name}", f"{rank}, as it is stored")
    return peer.stated, name


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
