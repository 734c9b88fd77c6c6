"""The linear weights of a model, and sites: the places in it that one choice governs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from gac.core.errors import PlanError

_EDITED = "Make it again; this file was edited."
LARGEST_SIZE, _MOST_HEADS = 2**31, 2**16

Side = Literal["out", "in"]
"""A side of a weight: its outputs or its inputs."""


@dataclass(frozen=True)
class Weight:
    """One linear weight, y = W x with W of shape ``(out_features, in_features)``.

    Attributes:
        name: dotted module name, for example ``model.layers.0.self_attn.q_proj``.
        neurons: the side that holds an MLP's neurons, and that ``narrow`` shortens; None elsewhere.
        blocks: how many vectors of neurons that side holds, one after the other: 2 where gate and up are one weight.
        reads: names the input where other weights read it too (q/k/v, gate/up); None where it is read alone.
        values: the side that holds the value vectors of an attention's heads, and that ``head_dim`` shortens: ``out``
            of v_proj, ``in`` of o_proj; None elsewhere.
        cached: whether the KV cache keeps its output (k_proj, v_proj), all but the queries.
        queries: how many of its outputs are queries, where one weight writes queries, keys and values.
        heads: how many heads its output consists of (k_proj, v_proj: key-value heads) or its input (o_proj: query
            heads); 0 elsewhere.
        writes: whether its output is added to the residual stream (o_proj, down_proj), as it is or behind what
            ``Family.between`` names.
        normed: whether a norm lies between that output and the stream.
        block: the side on which it meets the other weights of an attention or an MLP that can be skipped as a whole:
            ``in`` of the weight that writes, ``out`` of all others; None where it cannot.
        groups: how many groups of heads that side consists of, one after the other, each a key-value head with its
            query heads, where ``heads`` may drop some; 0 elsewhere.
        asked: how many query heads attend to what the cache keeps of its output (k_proj, v_proj); 0 elsewhere.
        made: whether a norm makes its input, and can round it, see ``Family.made``.
    """

    name: str
    out_features: int
    in_features: int
    neurons: Literal["out", "in"] | None = None
    reads: str | None = None
    values: Literal["out", "in"] | None = None
    heads: int = 0
    cached: bool = False
    blocks: int = 1
    queries: int = 0
    writes: bool = False
    normed: bool = False
    block: Side | None = None
    groups: int = 0
    asked: int = 0
    made: bool = False

    @property
    def params(self) -> int:
        """Parameters of the dense weight (biases are not counted)."""
        return self.out_features * self.in_features

    @property
    def scores(self) -> bool:
        """Whether attention scores come of its output (queries, keys), whose gradients are strongly correlated."""
        return not self.writes and self.neurons is None and self.values is None

    @property
    def split(self) -> Side:
        """The side that tensor parallelism divides over GPUs: what it reads where it writes to the residual stream.

        So o_proj and down_proj read what the GPU has computed itself, and their outputs are summed over the GPUs.
        """
        return "in" if self.writes else "out"

    def parts(self, gpus: int) -> int:
        """Into how many parts that side is divided for so many GPUs: at most as many as there are key-value heads.

        Where those are fewer, several GPUs have the same one, as its query heads are on several.
        """
        return min(gpus, self.heads) if self.cached and self.heads and not self.queries else gpus

    @property
    def kept(self) -> int:
        """Numbers that the KV cache keeps of a token for the dense weight."""
        return self.out_features - self.queries if self.cached else 0


def check_weight(weight: Weight) -> None:
    """Refuse a weight that cannot be, as an edited file may have it: all that forms count with divides.

    Raises:
        PlanError: a size is out of range, or neurons or heads do not divide the side that holds them.
    """
    sides = {"out": weight.out_features, "in": weight.in_features}
    divided = [(weight.neurons, weight.blocks), (weight.values, weight.heads)]
    divided += [("in" if weight.values == "in" else "out", weight.groups)] if weight.groups else []
    if (
        not all(1 <= size <= LARGEST_SIZE for size in sides.values())
        or not (weight.blocks >= 1 and 0 <= weight.heads <= _MOST_HEADS and 0 <= weight.queries <= weight.out_features)
        or (weight.cached and weight.heads > weight.out_features)
        or any(side and (count < 1 or sides[side] % count) for side, count in divided)
    ):
        raise PlanError(
            f"weight {weight.name} is {weight.out_features} x {weight.in_features} with {weight.blocks} blocks, "
            f"{weight.heads} heads and {weight.queries} queries",
            "sizes of at least 1 that blocks and heads divide",
            _EDITED,
        )


class Shortens(Protocol):
    """A form, as far as sites know of it."""

    def shortens(self, weight: Weight) -> Side | None:
        """The side of the weight that it shortens; None: neither."""


@dataclass(frozen=True)
class Site:
    """A place in the model that one choice governs.

    Attributes:
        name: dotted module name (``model.layers.0.mlp``, ``model.layers.0.self_attn.q_proj``).
        layer: index of the decoder layer.
        kind: what it is in the family's words (``q_proj``, ..., ``mlp``); the same in every layer.
        weights: the linear weights it governs; some forms take several of them at once.
        fused: positions of the first weights, whose first GEMMs run as one; empty where each runs by itself.
        either: whether they may run by themselves as well, so that this is chosen too.
    """

    name: str
    layer: int
    kind: str
    weights: tuple[Weight, ...]
    fused: tuple[int, ...] = ()
    either: bool = False

    @property
    def layouts(self) -> "tuple[Site, ...]":
        """The ways in which it may run: itself, or apart (the first) and fused."""
        return (self.run(shared=False), self.run(shared=True)) if self.either else (self,)

    def run(self, shared: bool) -> "Site":
        """The site where it is chosen whether its weights share a GEMM."""
        return replace(self, fused=self.fused if shared else (), either=False)

    @property
    def params(self) -> int:
        return sum(weight.params for weight in self.weights)

    def taken_by(self, form: Shortens) -> tuple[int, ...]:
        """Positions of the weights that a form shortens together; empty where it finds no two sides that meet."""
        found = tuple(at for at, weight in enumerate(self.weights) if form.shortens(weight))
        sides = {form.shortens(self.weights[at]) for at in found}
        return found if sides == {"out", "in"} else ()


def short_names(names: Sequence[str]) -> dict[str, str]:
    """What to call the weights of one layer: the last part of a name, after the part before it where two end alike."""
    parts = {name: name.split(".") for name in names}
    ends = Counter(found[-1] for found in parts.values())
    return {name: ".".join(found[-2:] if ends[found[-1]] > 1 else found[-1:]) for name, found in parts.items()}
