"""The seam of forms, as far as planning needs it: what one integer makes of a weight. Imports no torch.

A form has four parts: its shape (``Form`` itself), ``Form.latency``, ``Form.loss`` and ``Form.cache``; all but the
shape have defaults. What a form does with tensors is the other half of the seam, ``gac.forms.tensors``.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from gac.core.operations import Operation, attend, linear, routed
from gac.models.sites import Side, Weight

Split = Literal["colwise", "colwise_gather", "rowwise"]
"""The division of a matrix over GPUs: its rows (``colwise``, as engines call it, for these are columns of W^T), whose
outputs stay where they are or are gathered on every GPU, or its columns, whose outputs are summed (all-reduced)."""
DIVIDED = ("Linear", "ValueLinear")
"""Modules of one matrix that GPUs divide."""
Part = Literal["neurons", "heads", "attentions", "MLPs"]
"""The parts of a model other than GEMMs that a form can remove."""


@dataclass(frozen=True)
class Place:
    """The position of a dim in a tensor: along ``axis``, ending at each of the positions ``ends``.

    Zeros that are inserted there change nothing that the weight computes; ``unit`` of them make the dim larger by one.
    """

    tensor: str
    axis: int
    ends: tuple[int, ...]
    unit: int = 1


def ends(dim: int, copies: int) -> tuple[int, ...]:
    return tuple(dim * (copy + 1) for copy in range(copies))


@dataclass(frozen=True)
class ModuleSpec:
    """The module that runs a weight: its name in ``gac.runtime.modules.KINDS``, and the sizes that make one."""

    module: str
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.module}({', '.join(f'{name}={size}' for name, size in sorted(self.sizes.items()))})"


@dataclass(frozen=True)
class LossMeasure:
    """Measurement of a form's loss: in the metric of the method by default.

    Attributes:
        in_every_calibration: any later plan can use the form; others are measured where they are asked for. Such forms
            are measured at once, so that none finds what another has measured of the layer.
        needs_forward_runs: the model is run with each dim, see ``Statistics.runs``.
        uses_routed_tokens: it takes experts, and is measured on tokens that reach them (``Statistics.routed``).
        uses_attention_curvature: the metric is that of the attention over the KV cache, see ``Statistics.attended``.
        anchors: nats a token that all weights in the form would lose by the metric, at the dims where the model is run
            to correct it; used where the method is two-sided and some windows are held out
            (``gac.measurement.attended.held_out``).
    """

    in_every_calibration: bool = False
    needs_forward_runs: bool = False
    uses_routed_tokens: bool = False
    uses_attention_curvature: bool = False
    anchors: tuple[float, ...] = ()


class Latency:
    """The GEMMs that run a weight in a form; by default one, with the form's ``sides``.

    Attributes:
        timed: latency tables hold its operation; if not, they hold its GEMMs.
    """

    timed: ClassVar[bool] = True

    def __init__(self, form: "Form") -> None:
        self.form = form

    def gemms(self, weight: Weight, dim: int, rows: int) -> tuple[Operation, ...]:
        """The GEMM over the input of ``rows`` tokens, and the one that follows it, if any."""
        return (linear(rows, *self.form.sides(weight, dim)),)

    def axis(self, weight: Weight) -> str | None:
        """The axis of the operation that the dim sets; None: nothing to choose."""
        small, large = (self.operation(weight, dim, 1).axes for dim in (1, 2))
        return next((axis for axis, size in small.items() if size != large[axis]), None)

    def operation(self, weight: Weight, dim: int, rows: int) -> Operation:
        """The GEMMs as one operation for ``rows`` tokens."""
        if weight.experts:
            experts, width = self.form.routed_sizes(weight, dim)
            return routed(rows, experts, weight.top_k, weight.in_features, width)
        (only,) = self.gemms(weight, dim, rows)
        return only

    def matrices(self, weight: Weight, dim: int) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the matrices of the module; the blocks of a batched GEMM count as one matrix."""
        if weight.experts:  # those of one kind one above the other: gate and up, or up alone, and down
            experts, width = self.form.routed_sizes(weight, dim)
            return (experts * (weight.blocks - 1) * width, weight.in_features), (experts * weight.in_features, width)
        gemms = (gemm.axes for gemm in self.gemms(weight, dim, 1))
        return tuple((axes.get("b", 1) * axes["n"], axes["k"]) for axes in gemms)

    def splits(self, weight: Weight) -> tuple[Split, ...]:
        """The split of each of those matrices over GPUs, given the weight's ``split`` side; empty: for one GPU only."""
        if self.form.module(weight, self.form.full(weight)).module not in DIVIDED:
            return ()
        return ("colwise" if weight.split == "out" else "rowwise",)

    def gemm_after_fused(self, weight: Weight, dim: int, rows: int) -> Operation | None:
        """The GEMM that still runs after one over all weights with the same input, with the dim along axis k."""
        _, *rest = self.gemms(weight, dim, rows)
        return rest[0] if rest else None


class KVCache:
    """The numbers that the KV cache stores for a weight in a form, and the attention over them.

    Attributes:
        bits: of a quantised number, at the full dim; None: numbers have the dtype of the model. A form that quantises
            them loses something at its full dim too.
        exact_tokens: the last tokens of which a cache keeps all numbers as they are, and which are not counted.
    """

    bits: int | None = None
    exact_tokens: ClassVar[int] = 0

    def __init__(self, form: "Form") -> None:
        self.form = form

    def numbers(self, weight: Weight, dim: int) -> int:
        """Cached numbers of 16 bits per token; quantised numbers are counted by the 16-bit words that they fill."""
        if self.form.shortens(weight) != "out":
            return weight.cached_numbers
        full = self.form.size(weight, self.form.full(weight))
        return weight.cached_numbers * self.form.size(weight, dim) // full

    def bits_at(self, dim: int) -> int | None:
        return self.bits

    def attention(self, weight: Weight, dim: int, texts: int, context: int) -> Operation:
        return attend(texts, weight.query_heads, weight.heads, context, weight.out_features // weight.heads)

    def axis(self, weight: Weight) -> str | None:
        """The axis of that operation that the dim sets; None: its latency scales with the cached numbers."""
        return None

    def assumed_partner_dim(self, weight: Weight) -> int:
        """The dim of the other weight of the cache in that operation, whatever it is in a plan."""
        return self.form.full(weight)


class Form(ABC):
    """A way to store and run one weight, chosen with one integer: the dim.

    Attributes:
        name: as plans write it; a parameter follows after a colon.
        symbol: one letter for tables and figures.
        meaning: the dim in a few words.
        is_dense: it leaves the weight as it is.
        min_dim: the smallest dim.
        step: dims are multiples of it where they are to be aligned, whatever the weight's own GEMM would take.
        dim_counts_units: the dim counts heads or blocks, whose features are many and aligned, or bits: then any dim is.
        rule_resource: what a peer's rule distributes over the weights that it gives this form; None: no rule gives it.
        parent_form_name: the form that shortens its weights and those that they meet before it, so that it replaces
            them in a site which that form takes together; its curves are the loss beyond that form's.
        removes: parts of a model that it makes fewer, beside the GEMMs.
        served: GAC's plugin runs it in vLLM's own classes.
        tensor_form: its ``TensorForm``, ``module:class``; by default ``<class>Tensors`` in its ``torch.py``.
    """

    name: str
    symbol: ClassVar[str]
    meaning: ClassVar[str]
    is_dense: ClassVar[bool] = False
    min_dim: ClassVar[int] = 1
    step: ClassVar[int] = 1
    dim_counts_units: ClassVar[bool] = False
    loss: LossMeasure = LossMeasure()
    rule_resource: ClassVar[Literal["params", "cached"] | None] = None
    parent_form_name: ClassVar[str | None] = None
    removes: ClassVar[tuple[Part, ...]] = ()
    served: ClassVar[bool] = False
    tensor_form: ClassVar[str]

    def __init_subclass__(cls) -> None:
        in_package = hasattr(sys.modules.get(cls.__module__), "__path__")
        if in_package and "tensor_form" not in vars(cls):
            cls.tensor_form = f"{cls.__module__}.torch:{cls.__name__}Tensors"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    @cached_property
    def latency(self) -> Latency:
        return Latency(self)

    @cached_property
    def cache(self) -> KVCache:
        return KVCache(self)

    @property
    def base_form(self) -> "Form | None":
        """The form that is measured before it, and whose curves and tensors it uses; None: it needs no other."""
        return None

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    def applies_to(self, weight: Weight) -> bool:
        return not weight.is_routed

    def variants(self, weight: Weight) -> "tuple[Form, ...]":
        """The forms that the weight may have where this form is asked for: itself, or several of its kind."""
        return (self,)

    def full(self, weight: Weight) -> int:
        """The dim at which nothing is lost; by default the largest rank."""
        return min(weight.out_features, weight.in_features)

    def least(self, weight: Weight) -> int:
        """The smallest dim of this weight."""
        return self.min_dim

    def multiple(self, weight: Weight) -> int:
        """The number of which every dim of this weight is a multiple."""
        return 1

    @abstractmethod
    def params(self, weight: Weight, dim: int) -> int:
        """Exact number of parameters at this dim."""

    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        """The module that runs it; by default an ``nn.Linear`` with the form's ``sides``, or routed experts."""
        if weight.experts:
            sizes = zip(("experts", "width"), self.routed_sizes(weight, dim), strict=True)
            return ModuleSpec("Experts", dict(sizes))
        return ModuleSpec("Linear", dict(zip(("in_features", "out_features"), self.sides(weight, dim), strict=True)))

    @abstractmethod
    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        """The positions of the dim in the module's tensors, biases included whether the weight has one or not."""

    def sides(self, weight: Weight, dim: int) -> tuple[int, int]:
        return weight.in_features, weight.out_features * max(weight.experts, 1)

    def routed_sizes(self, weight: Weight, dim: int) -> tuple[int, int]:
        """The number of routed experts, and the neurons of each."""
        return weight.experts, weight.expert_width

    def label(self, dim: int) -> str:
        """A weight at this dim in a few letters, for tables: ``r 192``."""
        return f"{self.symbol} {dim}"

    def shortens(self, weight: Weight) -> Side | None:
        """The side of the weight that its dim shortens, as it does the side of another weight that meets it there."""
        return None

    def shortening(self, dim: int) -> "tuple[Form, int]":
        """The form and the dim that set the length of such a side: its own, or those of its parent form."""
        return self, dim

    def size(self, weight: Weight, dim: int) -> int:
        return dim

    def max_useful_dim(self, weight: Weight) -> int:
        """The largest dim with fewer parameters than the dense weight."""
        return (weight.params - 1) // self.params(weight, 1)

    def can_exceed_dense(self, weight: Weight) -> bool:
        return self.applies_to(weight) and self.params(weight, self.max_useful_dim(weight)) > weight.params


def variants_of(forms: Iterable[Form], weight: Weight) -> Iterator[Form]:
    return (variant for form in forms for variant in form.variants(weight))


class Dense(Form):
    name = "dense"
    symbol = "-"
    meaning = "dense, as it was"
    is_dense = True
    tensor_form = "gac.forms.tensors:DenseTensors"

    def applies_to(self, weight: Weight) -> bool:
        return True

    def params(self, weight: Weight, dim: int) -> int:
        return weight.params

    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        return ()


class Shorter(Form):
    """The same GEMM, shorter on one side, as is the side of another weight that it meets there."""

    @abstractmethod
    def shortens(self, weight: Weight) -> Side | None: ...

    def copies(self, weight: Weight) -> int:
        """Number of consecutive vectors of the dim on that side."""
        return 1

    def applies_to(self, weight: Weight) -> bool:
        return self.shortens(weight) is not None

    def full(self, weight: Weight) -> int:
        length = weight.out_features if self.shortens(weight) == "out" else weight.in_features
        return length // self.copies(weight)

    def params(self, weight: Weight, dim: int) -> int:
        return math.prod(self.sides(weight, dim))

    def size(self, weight: Weight, dim: int) -> int:
        return self.copies(weight) * dim

    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        positions = ends(dim, self.copies(weight))
        if self.shortens(weight) == "in":
            return (Place("weight", 1, positions),)
        return Place("weight", 0, positions), Place("bias", 0, positions)

    def sides(self, weight: Weight, dim: int) -> tuple[int, int]:
        size = self.size(weight, dim)
        return (weight.in_features, size) if self.shortens(weight) == "out" else (size, weight.out_features)
