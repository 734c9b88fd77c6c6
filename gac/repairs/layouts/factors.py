"""Weights stored as factors: pairs as SVD-LLM and ASVD name them, and the head groups of PaLU.

PaLU's k_proj and v_proj are in groups of heads, each of a rank of its own. A weight's ``VT`` ``(sum of ranks, in)``
writes the latents of all groups, one after the other; ``U.g`` ``(rows of a group, rank)`` reads those of group g.
``head_wise_ranks`` of ``config.json`` has the ranks (arXiv 2407.21118). A pair has one group.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, takewhile
from typing import Any

from gac.forms.base import Place
from gac.models.sites import Weight
from gac.repairs.dense import DenseModel
from gac.repairs.shared_dims import Block, Run, SharedDim
from gac.repairs.weight_files import Source


@dataclass(frozen=True)
class Peer:
    """How a compressor names the factors of a weight: A ``(sum of ranks, in)`` is ``first``, B_g is ``second``.

    Attributes:
        second, first: how the names of the tensors end; ``{}`` stands for the group, where there are groups.
        weights: what the weight may be called, with what stands before these endings as ``{}``.
        stated: the key of ``config.json`` that holds the rank, or those of the groups, by the weight's name.
    """

    name: str
    second: str
    first: str
    weights: tuple[str, ...] = ("{}",)
    stated: str = ""

    @property
    def grouped(self) -> bool:
        return "{}" in self.second


PEERS = (
    Peer("SVD-LLM", "_u_proj.weight", "_v_proj.weight", weights=("{}_proj", "{}")),
    Peer("ASVD", ".ALinear.weight", ".BLinear.weight", stated="truncation_ranks"),
    Peer("PaLU", ".U.{}.weight", ".VT.weight", stated="head_wise_ranks"),
)


def factored(peer: Peer) -> Callable[[Source, DenseModel], Iterator[Block]]:
    """The layout of a peer."""
    sign = peer.first if peer.grouped else peer.second

    def read(source: Source, dense: DenseModel) -> Iterator[Block]:
        for tensor in source.tensors:
            if tensor.endswith(sign):
                yield _block(source, dense, peer, tensor.removesuffix(sign))

    return read


def _block(source: Source, dense: DenseModel, peer: Peer, stem: str) -> Block:
    first, seconds = stem + peer.first, _seconds(source, peer, stem)
    if first not in source.tensors or not seconds:
        missing = first if seconds else stem + peer.second.format(0)
        raise source.contradiction(f"{stem} without {missing}", f"both factors, as {peer.name} stores them")
    called = [name.format(stem) for name in peer.weights]
    weight = next((dense.weights[name] for name in called if name in dense.weights), None)
    name = weight.name if weight else called[0]
    _check_product(source, weight, first, seconds)
    ranks = [source.tensors[second].shape[1] for second in seconds]
    path = _stated_at(source, peer, name, ranks if peer.grouped else ranks[0])
    shared = tuple(
        SharedDim(
            second.removesuffix(".weight") if peer.grouped else name,
            rank,
            (Place(second, 1, (rank,)), Place(first, 0, (end,))),
            stated=(*path, group) if path and peer.grouped else path,
        )
        for group, (second, rank, end) in enumerate(zip(seconds, ranks, accumulate(ranks), strict=True))
    )
    rows, into = source.tensors[seconds[0]].shape[0], source.tensors[first].shape[1]
    if not peer.grouped:
        return Block(shared, (Run("low_rank", (("k", into), ("n", rows)), "r", ((name, 1),)),))
    latents = Run("linear", (("k", into),), "n", tuple((one.name, 1) for one in shared))
    return Block(shared, (latents, *(Run("linear", (("n", rows),), "k", ((one.name, 1),)) for one in shared)))


def _seconds(source: Source, peer: Peer, stem: str) -> list[str]:
    names = (stem + peer.second.format(group) for group in (count() if peer.grouped else range(1)))
    return list(takewhile(source.tensors.__contains__, names))


def _check_product(source: Source, weight: Weight | None, first: str, seconds: Sequence[str]) -> None:
    inner, *outer = (source.tensors[name].shape for name in (first, *seconds))
    multiply = (
        all(len(shape) == 2 for shape in (inner, *outer))
        and len({shape[0] for shape in outer}) == 1
        and sum(shape[1] for shape in outer) == inner[0]
        and (weight is None or (weight.out_features, weight.in_features) == (outer[0][0] * len(outer), inner[1]))
    )
    if not multiply:
        of = f"{weight.out_features} x {weight.in_features}, the shape of {weight.name}" if weight else "one weight"
        sized = {name: f"{name} {' x '.join(map(str, source.tensors[name].shape))}" for name in (first, *seconds)}
        given = f"{' and '.join(sized[name] for name in seconds)} times {sized[first]}"
        raise source.contradiction(given, f"factors that multiply to {of}")


def _stated_at(source: Source, peer: Peer, name: str, stored: Any) -> tuple[str | int, ...]:
    """Where the config states the ranks; checks that they are the stored ones."""
    ranks = source.config.get(peer.stated)
    if not isinstance(ranks, dict) or ranks.get(name) is None:
        return ()
    if ranks[name] != stored:
        raise source.contradiction(f"config.json states rank {ranks[name]} for {name}", f"{stored}, as stored")
    return peer.stated, name
