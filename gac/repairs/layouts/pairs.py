"""Weights stored as two factors, W = B A: the names that SVD-LLM and ASVD give them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gac.forms import form_named
from gac.forms.base import Place
from gac.models.weights import Weight
from gac.repairs.dense import DenseModel
from gac.repairs.shared_dims import Block, SharedDim, run_of
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
