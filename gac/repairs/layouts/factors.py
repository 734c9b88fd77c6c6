"""Weights stored as factors: pairs as SVD-LLM and ASVD name them, and the head groups of PaLU (arXiv 2407.21118).

PaLU's k_proj and v_proj are groups of heads, each with a rank. ``VT`` ``(sum of ranks, in)`` of a weight computes the
latents of all groups, one after the other; ``U.g`` ``(rows of a group, rank)`` maps those of group g to its heads.
``head_wise_ranks`` of ``config.json`` has the ranks. A pair has one group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, takewhile
from typing import Any

from gac.forms.base import Place
from gac.models.sites import Weight
from gac.repairs.dims import Run, SharedDim
from gac.repairs.layouts.pruned import DenseModel
from gac.repairs.weight_files import Source


@dataclass(frozen=True)
class Peer:
    """The names that a compressor gives the factors of a weight: A ``(sum of ranks, in)`` is ``first``, B_g ``second``.

    Attributes:
        layout: its name in results.
        second, first: endings of the tensors' names; ``{}`` stands for the group, if there are groups.
        weights: possible names of the weight, with the part before these endings as ``{}``.
        stated: the key of ``config.json`` with the rank, or those of the groups, by the weight's name.
    """

    name: str
    layout: str
    second: str
    first: str
    weights: tuple[str, ...] = ("{}",)
    stated: str = ""

    @property
    def grouped(self) -> bool:
        return "{}" in self.second

    def find(self, source: Source, dense: DenseModel) -> Iterator[SharedDim]:
        """The rank of every pair, or of every group."""
        ending = self.first if self.grouped else self.second
        for tensor in source.tensors:
            if tensor.endswith(ending):
                yield from _ranks(source, dense, self, tensor.removesuffix(ending))


PEERS = (
    Peer("SVD-LLM", "pairs of SVD-LLM", "_u_proj.weight", "_v_proj.weight", weights=("{}_proj", "{}")),
    Peer("ASVD", "pairs of ASVD", ".ALinear.weight", ".BLinear.weight", stated="truncation_ranks"),
    Peer("PaLU", "head groups of PaLU", ".U.{}.weight", ".VT.weight", stated="head_wise_ranks"),
)


def _ranks(source: Source, dense: DenseModel, peer: Peer, stem: str) -> Iterator[SharedDim]:
    numbered = (stem + peer.second.format(group) for group in (count() if peer.grouped else range(1)))
    first, seconds = stem + peer.first, list(takewhile(source.tensors.__contains__, numbered))
    if first not in source.tensors or not seconds:
        missing = first if seconds else stem + peer.second.format(0)
        raise source.contradiction(f"{stem} without {missing}", f"both factors, as {peer.name} stores them")
    names = [name.format(stem) for name in peer.weights]
    weight = next((dense.weights[name] for name in names if name in dense.weights), None)
    name = weight.name if weight else names[0]
    _check_product(source, weight, first, seconds)
    ranks = [source.tensors[second].shape[1] for second in seconds]
    stated = _stated_path(source, peer, name, ranks if peer.grouped else ranks[0])
    rows, into = source.tensors[seconds[0]].shape[0], source.tensors[first].shape[1]
    if not peer.grouped:
        places = Place(seconds[0], 1, (ranks[0],)), Place(first, 0, (ranks[0],))
        yield SharedDim(
            name, ranks[0], places, (Run("low_rank", {"k": into, "n": rows}, "r", {name: 1}),), stated=stated
        )
        return
    owners = [second.removesuffix(".weight") for second in seconds]
    latents = Run("linear", {"k": into}, "n", dict.fromkeys(owners, 1))
    for group, (owner, rank, end) in enumerate(zip(owners, ranks, accumulate(ranks), strict=True)):
        places = Place(seconds[group], 1, (rank,)), Place(first, 0, (end,))
        heads = Run("linear", {"n": rows}, "k", {owner: 1})
        runs = (latents, heads) if group == 0 else (heads,)
        yield SharedDim(owner, rank, places, runs, stated=(*stated, group) if stated else ())


def _check_product(source: Source, weight: Weight | None, first: str, seconds: Sequence[str]) -> None:
    inner, *outer = (source.tensors[name].shape for name in (first, *seconds))
    multiply = (
        all(len(shape) == 2 for shape in (inner, *outer))
        and len({shape[0] for shape in outer}) == 1
        and sum(shape[1] for shape in outer) == inner[0]
        and (weight is None or (weight.out_features, weight.in_features) == (outer[0][0] * len(outer), inner[1]))
    )
    if not multiply:
        product = (
            f"{weight.out_features} x {weight.in_features}, the shape of {weight.name}" if weight else "one weight"
        )
        sized = {name: f"{name} {' x '.join(map(str, source.tensors[name].shape))}" for name in (first, *seconds)}
        problem = f"{' and '.join(sized[name] for name in seconds)} times {sized[first]}"
        raise source.contradiction(problem, f"factors that multiply to {product}")


def _stated_path(source: Source, peer: Peer, name: str, stored: Any) -> tuple[str | int, ...]:
    ranks = source.config.get(peer.stated)
    if not isinstance(ranks, dict) or ranks.get(name) is None:
        return ()
    if ranks[name] != stored:
        raise source.contradiction(f"config.json states rank {ranks[name]} for {name}", f"{stored}, as stored")
    return peer.stated, name
