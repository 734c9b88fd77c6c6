"""The linear weights of a model, and sites: the places in it that one choice governs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gac.core.errors import PlanError

_EDITED = "Make it again; this file was edited."
LARGEST_SIZE, _MOST_HEADS = 2**31, 2**16

Side = Literal["out", "in"]  # a side of a weight: its outputs or its inputs
_IN_FILES = {  # names of fields in plan files
    "input_group": "reads",
    "to_residual": "writes",
    "query_heads": "asked",
    "input_from_norm": "made",
    "fusion_optional": "either",
}
_STORED: Any = {"extra": "forbid", "allow_inf_nan": False, "alias_generator": lambda name: _IN_FILES.get(name, name)}


@dataclass(frozen=True)
class Weight:
    """One linear weight, y = W x with W of shape ``(out_features, in_features)``; None and 0: it has no such thing."""

    __pydantic_config__ = _STORED

    name: str  # dotted module name: ``model.layers.0.self_attn.q_proj``
    out_features: int
    in_features: int
    neurons: Side | None = None  # the side with an MLP's neurons, which ``narrow`` shortens
    input_group: str | None = None  # names the input that several weights share (q/k/v, gate/up)
    # The side with the value vectors of heads, which ``head_dim`` shortens: ``out`` of v_proj, ``in`` of o_proj.
    values: Side | None = None
    heads: int = 0  # heads of its output (k_proj, v_proj: key-value heads) or input (o_proj: query heads)
    cached: bool = False  # the KV cache keeps its output (k_proj, v_proj), all but the queries
    as_values: bool = False  # it is cached as values too, which have no weight of their own
    # Consecutive vectors of neurons on that side: 2 where gate and up are one weight, 3 of experts that hold all three.
    blocks: int = 1
    queries: int = 0  # outputs that are queries, where one weight has queries, keys and values as outputs
    to_residual: bool = False  # its output is added to the residual stream (o_proj, down_proj), see ``ResidualPath``
    normed: bool = False  # a norm lies between that output and the stream
    # The side on which it meets the other weights of an attention or MLP that can be skipped: ``in`` of the weight
    # that writes to the stream, ``out`` of all others.
    block: Side | None = None
    # Consecutive groups on that side, each a key-value head with its query heads, where ``heads`` may drop some.
    groups: int = 0
    query_heads: int = 0  # query heads that attend to its cached output (k_proj, v_proj)
    input_from_norm: bool = False  # its input is the output of a norm that can quantise it: ``Family.norm_outputs``
    # Experts that take each token, of a router and of its experts: no ``nn.Linear``, so that few forms know them.
    top_k: int = 0
    experts: int = 0  # matrices of these sizes under its name: gate, up and down (transposed) of each routed expert
    expert_groups: int = 0  # groups of as many experts each, of which the router first takes some; 0: it knows none
    chosen_groups: int = 0  # groups that it takes for a token

    @property
    def params(self) -> int:
        """Parameters of the dense weight (biases are not counted)."""
        return self.out_features * self.in_features * max(self.experts, 1)

    @property
    def is_routed(self) -> bool:
        """True for a router and for routed experts."""
        return self.top_k > 0

    @property
    def expert_width(self) -> int:
        """Neurons of each routed expert."""
        return self.out_features // self.blocks

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
        return (1 + self.as_values) * (self.out_features - self.queries) if self.cached else 0


def check_weight(weight: Weight) -> None:
    """Refuse impossible sizes, which an edited file may have.

    A PlanError says if a size is out of range, or if neurons or heads do not divide the side that holds them.
    """
    sides = {"out": weight.out_features, "in": weight.in_features}
    divided = [(weight.neurons, weight.blocks), (weight.values, weight.heads)]
    divided += [("in" if weight.values == "in" else "out", weight.groups)] if weight.groups else []
    if (
        not all(1 <= size <= LARGEST_SIZE for size in sides.values())
        or not (weight.blocks >= 1 and 0 <= weight.heads <= _MOST_HEADS and 0 <= weight.queries <= weight.out_features)
        or (weight.cached and weight.heads > weight.out_features)
        or any(side and (count < 1 or sides[side] % count) for side, count in divided)
        or not 0 <= weight.chosen_groups <= weight.expert_groups
        or (weight.expert_groups and (weight.experts or weight.out_features) % weight.expert_groups)
        or not 0 <= weight.top_k <= (weight.experts or weight.out_features) <= max(weight.out_features, _MOST_HEADS)
    ):
        raise PlanError(
            f"weight {weight.name} is {weight.out_features} x {weight.in_features} with {weight.blocks} blocks, "
            f"{weight.heads} heads and {weight.queries} queries",
            "sizes of at least 1 that blocks and heads divide",
            _EDITED,
        )


@dataclass(frozen=True)
class Site:
    """A place in the model that one choice governs."""

    __pydantic_config__ = _STORED

    name: str  # dotted module name
    layer: int
    kind: str  # its name in the family (``q_proj``, ..., ``mlp``); the same in every layer
    weights: tuple[Weight, ...]  # some forms take several of them at once
    fused: tuple[int, ...] = ()  # positions of the first weights, whose first GEMMs run as one; empty: each by itself
    fusion_optional: bool = False  # they may also run one by one, so that this is chosen too

    @property
    def fused_and_unfused(self) -> "tuple[Site, ...]":
        """The ways in which it may run: only itself, or first unfused and then fused."""
        return (self.with_fusion(False), self.with_fusion(True)) if self.fusion_optional else (self,)

    def with_fusion(self, fused: bool) -> "Site":
        return replace(self, fused=self.fused if fused else (), fusion_optional=False)

    @property
    def params(self) -> int:
        return sum(weight.params for weight in self.weights)

    def joint_weights(self, form: Any) -> tuple[int, ...]:
        """Positions of the weights that a ``Form`` shortens together; empty where no two of their sides meet."""
        sides = {index: side for index, weight in enumerate(self.weights) if (side := form.shortens(weight))}
        return tuple(sides) if {*sides.values()} == {"out", "in"} else ()


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Names of the weights of one layer for tables: the last part, and the one before it where two end alike."""
    parts = {name: name.split(".") for name in names}
    ends = Counter(split[-1] for split in parts.values())
    return {name: ".".join(split[-2:] if ends[split[-1]] > 1 else split[-1:]) for name, split in parts.items()}
