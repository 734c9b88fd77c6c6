"""The linear weights of a model, and sites: the places in it that one choice governs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from gac.core.errors import PlanError

_EDITED = "Make it again; this file was edited."
LARGEST_SIZE, _MOST_HEADS = 2**31, 2**16

Side = Literal["out", "in"]
"""A side of a weight: its outputs or its inputs."""
_IN_FILES = {
    "input_group": "reads",
    "to_residual": "writes",
    "query_heads": "asked",
    "input_from_norm": "made",
    "fusion_optional": "either",
}
"""Names of fields in plan files."""
_STORED: Any = {
    "extra": "forbid",
    "allow_inf_nan": False,
    "alias_generator": lambda name: _IN_FILES.get(name, name),
}


@dataclass(frozen=True)
class Weight:
    """One linear weight, y = W x with W of shape ``(out_features, in_features)``.

    Attributes:
        name: dotted module name, for example ``model.layers.0.self_attn.q_proj``.
        neurons: the side with an MLP's neurons, which ``narrow`` shortens; None elsewhere.
        input_group: names the input that several weights share (q/k/v, gate/up); None where no other weight has it.
        values: the side with the value vectors of an attention's heads, which ``head_dim`` shortens: ``out`` of v_proj,
            ``in`` of o_proj; None elsewhere.
        heads: number of heads of its output (k_proj, v_proj: key-value heads) or input (o_proj: query heads); 0
            elsewhere.
        cached: the KV cache keeps its output (k_proj, v_proj), all but the queries.
        blocks: number of consecutive vectors of neurons on that side: 2 where gate and up are one weight.
        queries: number of outputs that are queries, where one weight has queries, keys and values as outputs.
        to_residual: its output is added to the residual stream (o_proj, down_proj), directly or through a
            ``ResidualPath``.
        normed: a norm lies between that output and the stream.
        block: the side on which it meets the other weights of an attention or MLP that can be skipped: ``in`` of the
            weight that writes to the stream, ``out`` of all others; None where it cannot be skipped.
        groups: number of consecutive groups of heads on that side, each a key-value head with its query heads, where
            ``heads`` may drop some; 0 elsewhere.
        query_heads: number of query heads that attend to its cached output (k_proj, v_proj); 0 elsewhere.
        input_from_norm: its input is the output of a norm that can quantise it, see ``Family.norm_outputs``.
    """

    __pydantic_config__ = _STORED

    name: str
    out_features: int
    in_features: int
    neurons: Side | None = None
    input_group: str | None = None
    values: Side | None = None
    heads: int = 0
    cached: bool = False
    blocks: int = 1
    queries: int = 0
    to_residual: bool = False
    normed: bool = False
    block: Side | None = None
    groups: int = 0
    query_heads: int = 0
    input_from_norm: bool = False

    @property
    def params(self) -> int:
        """Parameters of the dense weight (biases are not counted)."""
        return self.out_features * self.in_features

    @property
    def scores(self) -> bool:
        """True for queries and keys: the gradients of their outputs are strongly correlated."""
        return not self.to_residual and self.neurons is None and self.values is None

    @property
    def split(self) -> Side:
        """The side that tensor parallelism divides: the inputs of o_proj and down_proj, the outputs of all others.

        So o_proj and down_proj read what the GPU has computed itself, and their outputs are summed over the GPUs.
        """
        return "in" if self.to_residual else "out"

    def parts(self, gpus: int) -> int:
        """Number of parts of that side on so many GPUs: at most the number of key-value heads.

        Where those are fewer, several GPUs have the same one, as its query heads are on several.
        """
        return min(gpus, self.heads) if self.cached and self.heads and not self.queries else gpus

    @property
    def cached_numbers(self) -> int:
        """Numbers per token in the KV cache for the dense weight."""
        return self.out_features - self.queries if self.cached else 0


def check_weight(weight: Weight) -> None:
    """Refuse impossible sizes, which an edited file may have.

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
        kind: its name in the family (``q_proj``, ..., ``mlp``); the same in every layer.
        weights: the linear weights it governs; some forms take several of them at once.
        fused: positions of the first weights, whose first GEMMs run as one; empty where each runs by itself.
        fusion_optional: they may also run one by one, so that this is chosen too.
    """

    __pydantic_config__ = _STORED

    name: str
    layer: int
    kind: str
    weights: tuple[Weight, ...]
    fused: tuple[int, ...] = ()
    fusion_optional: bool = False

    @property
    def fused_and_unfused(self) -> "tuple[Site, ...]":
        """The ways in which it may run: only itself, or first unfused and then fused."""
        return (self.with_fusion(False), self.with_fusion(True)) if self.fusion_optional else (self,)

    def with_fusion(self, fused: bool) -> "Site":
        """The site where this has been chosen."""
        return replace(self, fused=self.fused if fused else (), fusion_optional=False)

    @property
    def params(self) -> int:
        return sum(weight.params for weight in self.weights)

    def joint_weights(self, form: Shortens) -> tuple[int, ...]:
        """Positions of the weights that a form shortens together; empty where no two of their sides meet."""
        shortened = tuple(index for index, weight in enumerate(self.weights) if form.shortens(weight))
        sides = {form.shortens(self.weights[index]) for index in shortened}
        return shortened if sides == {"out", "in"} else ()


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Names of the weights of one layer for tables: the last part, and the one before it where two end alike."""
    parts = {name: name.split(".") for name in names}
    ends = Counter(split[-1] for split in parts.values())
    return {name: ".".join(split[-2:] if ends[split[-1]] > 1 else split[-1:]) for name, split in parts.items()}
