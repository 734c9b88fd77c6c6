"""One linear weight of a model, as everything that plans it sees it."""

from dataclasses import dataclass
from typing import Literal

from gac.errors import PlanError

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
        writes: whether its output is added to the residual stream as it is (o_proj, down_proj; not where a norm or a
            factor comes between).
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

    @property
    def params(self) -> int:
        """Parameters of the dense weight (biases are not counted)."""
        return self.out_features * self.in_features

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
