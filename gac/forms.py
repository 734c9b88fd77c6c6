"""The forms a weight can take: what each costs in parameters, and which operation it runs as.

Nothing outside a form's own code asks which form it is: counting, timing and building go through
the registry here (parameters, operations) and in ``gac.runtime.modules`` (modules).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from gac.errors import PlanError

_GROUP = re.compile(r"[1-9][0-9]{0,5}")
_EDITED = "Make it again; this file was edited."
LARGEST_SIZE, _MOST_HEADS = 2**31, 2**16

Fusing = bool | Literal["auto"]
"""Whether first GEMMs of one input run as one: everywhere, nowhere, or where that is chosen."""


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


def check_choice(weight: Weight, form: str, dim: int) -> None:
    """Refuse a form and dim that a weight cannot have, or a weight that cannot be.

    Raises:
        PlanError: the form is unknown or none that the weight can take, or the dim is not one from 1 to the full one.
    """
    check_weight(weight)
    known = form_named(form)
    if not known.takes(weight):
        raise PlanError(f"weight {weight.name} has the form {form}", "a form that it can take", _EDITED)
    if not 0 < dim <= known.full(weight):
        raise PlanError(f"weight {weight.name} has {form} dim {dim}", f"a dim from 1 to {known.full(weight)}", _EDITED)


def check_choices(weights: Sequence[Weight], forms: Sequence[str], dims: Sequence[int], params: int, what: str) -> None:
    """Refuse forms and dims, one a weight, that ``check_choice`` refuses, or that do not make ``params`` parameters.

    Args:
        what: how an error names them: ``an option of site ...``.

    Raises:
        PlanError: naming the weight, or both numbers of parameters.
    """
    choices = list(zip(weights, forms, dims, strict=True))
    for choice in choices:
        check_choice(*choice)
    counted = sum(form_named(form).params(weight, dim) for weight, form, dim in choices)
    if counted != params:
        raise PlanError(f"{what} states {params} parameters", f"{counted}, as its dims say", _EDITED)


@dataclass(frozen=True)
class Operation:
    """One timed shape of an operator.

    ``linear`` has axes m, k, n: ``x[m, k] @ W[n, k].T``. ``low_rank`` has axes m, k, r, n:
    ``x[m, k] -> r -> n``, two GEMMs. m is the number of rows (tokens).
    """

    operator: str
    shape: tuple[tuple[str, int], ...]

    @property
    def axes(self) -> dict[str, int]:
        return dict(self.shape)


def linear(m: int, k: int, n: int) -> Operation:
    """A GEMM ``x[m, k] @ W[n, k].T``."""
    return Operation("linear", (("m", m), ("k", k), ("n", n)))


def batched_gemm(b: int, m: int, k: int, n: int) -> Operation:
    """``x[b, m, k] @ W[b, n, k].T`` for every b."""
    return Operation("batched_gemm", (("b", b), ("m", m), ("k", k), ("n", n)))


def low_rank(m: int, k: int, r: int, n: int) -> Operation:
    """A pair of GEMMs ``x[m, k] -> r -> n``."""
    return Operation("low_rank", (("m", m), ("k", k), ("r", r), ("n", n)))


def at_one_row(operation: Operation) -> Operation:
    """What runs instead where GEMMs of one row run in Triton (``gac.runtime.decode_kernel``); else the operation."""
    if operation.operator in ("linear", "low_rank") and operation.axes["m"] == 1:
        return Operation(f"{operation.operator}_triton", operation.shape)
    return operation


class Form(ABC):
    """A way to store and run one weight, chosen with one integer: the dim.

    Attributes:
        name: as plans write it; a parameter follows after a colon.
        step: dims are multiples of it where they are to be aligned, whatever the weight's own GEMM would take.
        timed: whether its operation is one that latency tables hold.
        counts: what a peer's rule shares out between the weights that it gives this form; None: no rule gives it.
    """

    name: str
    step: ClassVar[int] = 1
    timed: ClassVar[bool] = True
    counts: ClassVar[Literal["params", "cached"] | None] = None

    @property
    def kind(self) -> str:
        """The name without its parameter: loss curves, modules and builders are found by it."""
        return self.name.partition(":")[0]

    def takes(self, weight: Weight) -> bool:
        """Whether the weight can have this form."""
        return True

    @abstractmethod
    def full(self, weight: Weight) -> int:
        """The dim at which nothing is lost."""

    @abstractmethod
    def params(self, weight: Weight, dim: int) -> int:
        """Exact number of parameters at this dim."""

    @abstractmethod
    def operation(self, weight: Weight, dim: int, rows: int) -> Operation:
        """What runs at this dim for ``rows`` tokens."""

    def gemms(self, weight: Weight, dim: int, rows: int) -> tuple[Operation, ...]:
        """The GEMMs that make up the operation."""
        return (self.operation(weight, dim, rows),)

    @abstractmethod
    def axis(self, weight: Weight) -> str | None:
        """The axis of the operation that the dim moves (None: nothing to choose)."""

    @abstractmethod
    def fused(self, weight: Weight, dim: int) -> int:
        """Output features that it adds to one GEMM over all weights that read the same input."""

    @abstractmethod
    def after(self, weight: Weight, dim: int, rows: int) -> Operation | None:
        """What still runs after that GEMM, moved by the dim along axis k; None where nothing does."""

    def shortens(self, weight: Weight) -> Literal["out", "in"] | None:
        """The side of the weight that it shortens, as it does the side of another weight that meets it there."""
        return None

    def size(self, weight: Weight, dim: int) -> int:
        """How long that dim makes the axis that it moves."""
        return dim

    def cached(self, weight: Weight, dim: int) -> int:
        """Numbers that the KV cache keeps of a token for this weight."""
        return weight.kept

    def largest_useful(self, weight: Weight) -> int:
        """The largest dim with fewer parameters than the dense weight."""
        return (weight.params - 1) // self.params(weight, 1)


class Dense(Form):
    """The weight as it is."""

    name = "dense"

    def full(self, weight: Weight) -> int:
        return min(weight.out_features, weight.in_features)

    def params(self, weight: Weight, dim: int) -> int:
        return weight.params

    def operation(self, weight: Weight, dim: int, rows: int) -> Operation:
        return linear(rows, weight.in_features, weight.out_features)

    def axis(self, weight: Weight) -> None:
        return None

    def fused(self, weight: Weight, dim: int) -> int:
        return weight.out_features

    def after(self, weight: Weight, dim: int, rows: int) -> None:
        return None


class LowRank(Form):
    """W ~ B A with B ``(out, rank)`` and A ``(rank, in)``: two GEMMs."""

    name = "low_rank"
    counts = "params"

    def full(self, weight: Weight) -> int:
        return min(weight.out_features, weight.in_features)

    def params(self, weight: Weight, dim: int) -> int:
        return dim * (weight.out_features + weight.in_features)

    def operation(self, weight: Weight, dim: int, rows: int) -> Operation:
        return low_rank(rows, weight.in_features, dim, weight.out_features)

    def gemms(self, weight: Weight, dim: int, rows: int) -> tuple[Operation, ...]:
        return linear(rows, weight.in_features, dim), linear(rows, dim, weight.out_features)

    def axis(self, weight: Weight) -> str:
        return "r"

    def fused(self, weight: Weight, dim: int) -> int:
        return dim

    def after(self, weight: Weight, dim: int, rows: int) -> Operation:
        return linear(rows, dim, weight.out_features)


class Shorter(Form):
    """The same GEMM, shorter on one side, as is the side of another weight that it meets there."""

    @abstractmethod
    def shortens(self, weight: Weight) -> Literal["out", "in"] | None: ...

    def takes(self, weight: Weight) -> bool:
        return self.shortens(weight) is not None

    def full(self, weight: Weight) -> int:
        return self._length(weight) // self.size(weight, 1)

    def params(self, weight: Weight, dim: int) -> int:
        return self.size(weight, dim) * (weight.params // self._length(weight))

    def operation(self, weight: Weight, dim: int, rows: int) -> Operation:
        if self.shortens(weight) == "out":
            return linear(rows, weight.in_features, self.size(weight, dim))
        return linear(rows, self.size(weight, dim), weight.out_features)

    def axis(self, weight: Weight) -> str:
        return "n" if self.shortens(weight) == "out" else "k"

    def fused(self, weight: Weight, dim: int) -> int:
        assert self.shortens(weight) == "out", f"{weight.name} is shorter on the side of its input"
        return self.size(weight, dim)

    def after(self, weight: Weight, dim: int, rows: int) -> None:
        return None

    def cached(self, weight: Weight, dim: int) -> int:
        shorter = weight.cached and self.shortens(weight) == "out"
        return self.size(weight, dim) if shorter else weight.kept

    def _length(self, weight: Weight) -> int:
        return weight.out_features if self.shortens(weight) == "out" else weight.in_features


class Narrow(Shorter):
    """The MLP with fewer neurons."""

    name = "narrow"

    def shortens(self, weight: Weight) -> Literal["out", "in"] | None:
        return weight.neurons

    def size(self, weight: Weight, dim: int) -> int:
        return weight.blocks * dim


class HeadDim(Shorter):
    """Attention with shorter value vectors, the same length in every head of a layer: v_proj and o_proj are smaller.

    So is the cache of values. Queries and keys keep their length, for rotary embeddings turn theirs. Attention kernels
    read rows of 16 bytes (FlashAttention and cuDNN take 16-bit head_dims that are multiples of 8), hence the step.
    """

    name = "head_dim"
    step = 8

    def shortens(self, weight: Weight) -> Literal["out", "in"] | None:
        return weight.values

    def size(self, weight: Weight, dim: int) -> int:
        return weight.heads * dim


DEFAULT_GROUP = 4


class Grouped(Form):
    """k_proj or v_proj as a low-rank pair for each group of heads, all of one rank (PaLU, arXiv 2407.21118).

    W's rows of one group are B_g A_g with B_g ``(rows of the group, rank)`` and A_g ``(rank, in)``. The A_g are one
    GEMM together, the B_g a batched GEMM. What the A_g write, the latents, is counted as what the KV cache keeps, as in
    PaLU's own runtime. Here latents are multiplied out before they are cached: the cache that runs is the dense one.
    Latency is unknown, for no table holds such a pair. Rows of 16 bytes want ranks that are multiples of 8 in 16 bit.

    Args:
        group: heads in a group. A layer with no more heads than that is one group.
    """

    step = 8
    timed = False
    counts = "cached"

    def __init__(self, group: int = DEFAULT_GROUP) -> None:
        self.group = group
        self.name = "grouped" if group == DEFAULT_GROUP else f"grouped:{group}"

    def takes(self, weight: Weight) -> bool:
        return weight.cached and weight.heads > 0

    def groups(self, weight: Weight) -> int:
        """How many groups the weight's heads make.

        Raises:
            PlanError: the heads cannot be divided into such groups.
        """
        if weight.heads > self.group and weight.heads % self.group:
            divisors = [str(size) for size in range(1, weight.heads + 1) if weight.heads % size == 0]
            raise PlanError(
                f"groups of {self.group} of the {weight.heads} heads of {weight.name}",
                f"groups of {', '.join(divisors)} heads",
                f"Give the number of heads after a colon: grouped:{divisors[-1]}, or the method palu:{divisors[-1]}.",
            )
        return max(1, weight.heads // self.group)

    def full(self, weight: Weight) -> int:
        return min(weight.out_features // self.groups(weight), weight.in_features)

    def params(self, weight: Weight, dim: int) -> int:
        return dim * (self.groups(weight) * weight.in_features + weight.out_features)

    def cached(self, weight: Weight, dim: int) -> int:
        return self.groups(weight) * dim

    def largest_useful(self, weight: Weight) -> int:
        """The largest dim with a smaller cache than the dense weight; its parameters may be more."""
        return self.full(weight) - 1

    def operation(self, weight: Weight, dim: int, rows: int) -> Operation:
        pair = low_rank(rows, weight.in_features, dim, weight.out_features)
        return Operation("grouped_low_rank", (("b", self.groups(weight)), *pair.shape))

    def gemms(self, weight: Weight, dim: int, rows: int) -> tuple[Operation, ...]:
        return linear(rows, weight.in_features, self.fused(weight, dim)), self.after(weight, dim, rows)

    def axis(self, weight: Weight) -> str:
        return "r"

    def fused(self, weight: Weight, dim: int) -> int:
        return self.groups(weight) * dim

    def after(self, weight: Weight, dim: int, rows: int) -> Operation:
        groups = self.groups(weight)
        return batched_gemm(groups, rows, dim, weight.out_features // groups)


_ENOUGH_OUTPUTS = 1 << 22


def apart_from(rows: int) -> int:
    """Output features from which a weight is multiplied by itself, though it shares a GEMM with others.

    4 Mi outputs, 256 tiles of 128 x 128, fill a GPU alone. Sharing wins nothing then, and its part would lie scattered
    in the shared output, which slows down what reads it: gate and up of Llama-3-8B at 1,024 tokens.
    """
    return -(-_ENOUGH_OUTPUTS // rows)


DEFAULT_FORMS = ("low_rank", "narrow")
"""What competes with staying dense where nothing else is asked for."""

FORMS: Mapping[str, Form] = MappingProxyType(
    {form.name: form for form in (Dense(), LowRank(), Narrow(), HeadDim(), Grouped())}
)
"""One form of every kind."""


def form_named(name: str) -> Form:
    """The form of this name.

    ``grouped:N`` has groups of N heads instead of 4.

    Raises:
        PlanError: there is no such form.
    """
    kind, colon, group = name.partition(":")
    if kind == "grouped" and colon and _GROUP.fullmatch(group):
        return Grouped(int(group))
    if name not in FORMS:
        raise PlanError(f"form {name!r} is unknown", f"one of {', '.join(FORMS)}", "Correct the name.")
    return FORMS[name]
