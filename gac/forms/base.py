"""The seam of forms, as far as planning needs it: what one integer makes of a weight. Imports no torch.

What a form does with tensors is the other half of the seam, ``gac.forms.tensors``.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar, Literal

from gac.core.operations import Operation, attend, linear
from gac.models.sites import Side, Weight

if TYPE_CHECKING:
    from gac.forms.tensors import TensorForm


Split = Literal["colwise", "colwise_gather", "rowwise"]
"""How a matrix is divided over GPUs: its rows (``colwise``, as engines call it, for these are columns of W^T), whose
outputs stay where they are or are gathered on every GPU, or its columns, whose outputs are summed (all-reduced)."""


@dataclass(frozen=True)
class Place:
    """Where a dim lies in a tensor: along ``axis``, ending at each of the positions ``ends``.

    Zeros that are put in there change nothing that the weight computes; ``unit`` of them make the dim larger by one.
    """

    tensor: str
    axis: int
    ends: tuple[int, ...]
    unit: int = 1


def ends(dim: int, copies: int = 1) -> tuple[int, ...]:
    """The ends of vectors of ``dim`` that lie one after the other."""
    return tuple(dim * (copy + 1) for copy in range(copies))


@dataclass(frozen=True)
class ModuleSpec:
    """What runs a weight: the name of a module in ``gac.runtime.modules.KINDS``, and the sizes that make one."""

    module: str
    sizes: Mapping[str, int]


class Form(ABC):
    """A way to store and run one weight, chosen with one integer: the dim.

    Attributes:
        name: as plans write it; a parameter follows after a colon.
        symbol: one letter for tables and figures.
        meaning: what the dim is, in a few words.
        tensor_form: where its ``TensorForm`` is, ``module:class``; imported when tensors are first at hand.
        standard: whether every calibration measures it, so that any later plan can use it; others when they are asked
            for.
        least: the smallest dim.
        step: dims are multiples of it where they are to be aligned, whatever the weight's own GEMM would take.
        pieces: whether the dim counts heads or blocks, whose features are many and aligned: then any dim is.
        runs: whether the model is run to measure what each dim loses, see ``Statistics.runs``.
        attended: whether what it loses is measured in what attention makes of it, see ``Statistics.attended``.
        anchors: nats a token that all weights in the form would lose by their prices at the dims where the model is run
            to correct these; where the method is two-sided, and some windows are held out
            (``gac.measurement.attended.held_out``).
        timed: whether its operation is one that latency tables hold.
        counts: what a peer's rule shares out between the weights that it gives this form; None: no rule gives it.
        bits: of a number that the KV cache keeps of it; None: numbers are kept as they are loaded. A form that rounds
            them loses something at its full dim too.
        inside: the form that shortens its weights and those that they meet before it, so that it takes their place in
            a site which that form takes together; its curves are what it loses beyond that form. None: it stands alone.
    """

    name: str
    symbol: ClassVar[str]
    meaning: ClassVar[str]
    tensor_form: ClassVar[str]
    standard: ClassVar[bool] = False
    least: ClassVar[int] = 1
    step: ClassVar[int] = 1
    pieces: ClassVar[bool] = False
    runs: ClassVar[bool] = False
    attended: ClassVar[bool] = False
    anchors: ClassVar[tuple[float, ...]] = ()
    timed: ClassVar[bool] = True
    counts: ClassVar[Literal["params", "cached"] | None] = None
    bits: int | None = None
    inside: ClassVar[str | None] = None

    @property
    def upon(self) -> "Form | None":
        """The form that is measured before it, on whose curves and tensors its own rest; None: it stands alone."""
        return None

    @property
    def kind(self) -> str:
        """The name without its parameter."""
        return self.name.partition(":")[0]

    @cached_property
    def tensors(self) -> "TensorForm":
        """What it does with tensors; needs torch."""
        found: TensorForm = resolve_name(self.tensor_form)(self)
        return found

    def takes(self, weight: Weight) -> bool:
        """Whether the weight can have this form."""
        return True

    def variants(self, weight: Weight) -> "tuple[Form, ...]":
        """What the weight may have where this form is asked for: itself, or several forms of its kind."""
        return (self,)

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
        """The GEMMs that make up the operation: itself, or that over the input and what runs after it."""
        after = self.after(weight, dim, rows)
        if after is None:
            return (self.operation(weight, dim, rows),)
        return linear(rows, weight.in_features, self.fused(weight, dim)), after

    def matrices(self, weight: Weight, dim: int) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the matrices that its module holds, those of several blocks as one."""
        axes = (one.axes for one in self.gemms(weight, dim, 1))
        return tuple((one.get("b", 1) * one["n"], one["k"]) for one in axes)

    def splits(self, weight: Weight) -> tuple[Split, ...]:
        """How each of those matrices is divided over GPUs, where the weight's ``split`` side is."""
        return ("colwise" if weight.split == "out" else "rowwise",)

    @abstractmethod
    def axis(self, weight: Weight) -> str | None:
        """The axis of the operation that the dim moves (None: nothing to choose)."""

    @abstractmethod
    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        """The module that runs it."""

    @abstractmethod
    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        """Where the dim lies in the module's tensors, biases among them whether the weight has one or not."""

    @abstractmethod
    def fused(self, weight: Weight, dim: int) -> int:
        """Output features that it adds to one GEMM over all weights that read the same input."""

    def after(self, weight: Weight, dim: int, rows: int) -> Operation | None:
        """What still runs after that GEMM, moved by the dim along axis k; None where nothing does."""
        return None

    def told(self, dim: int) -> str:
        """What tables say of a weight at this dim, in a few letters: ``r 192``."""
        return f"{self.symbol} {dim}"

    def shortens(self, weight: Weight) -> Side | None:
        """The side of the weight that its dim shortens, as it does the side of another weight that meets it there."""
        return None

    def shortening(self, dim: int) -> "tuple[Form, int]":
        """The form and the dim that say how long such a side is: itself, or what it lies inside."""
        return self, dim

    def size(self, weight: Weight, dim: int) -> int:
        """How long that dim makes the axis that it moves."""
        return dim

    def cached(self, weight: Weight, dim: int) -> int:
        """Numbers of 16 bits that the KV cache keeps of a token for this weight; what rounded ones fill counts so."""
        return weight.kept

    def attention(self, weight: Weight, dim: int, texts: int, context: int) -> Operation:
        """What attends over the cache for a new token of each text, in a dense model or moved by ``cache_axis``."""
        return attend(texts, weight.asked, weight.heads, context, weight.out_features // weight.heads)

    def cache_axis(self, weight: Weight) -> str | None:
        """The axis of that operation which the dim moves; None: it takes the share of the cache that is left."""
        return None

    def beside(self, weight: Weight) -> int:
        """The dim that the other weight of the cache has in that operation, whatever it has in a plan."""
        return self.full(weight)

    def largest_useful(self, weight: Weight) -> int:
        """The largest dim with fewer parameters than the dense weight."""
        return (weight.params - 1) // self.params(weight, 1)

    def outgrows(self, weight: Weight) -> bool:
        """Whether it may have more parameters than the dense weight."""
        return self.takes(weight) and self.params(weight, self.largest_useful(weight)) > weight.params


def variants_of(forms: Iterable[Form], weight: Weight) -> Iterator[Form]:
    """What the weight may have where these forms are asked for."""
    return (one for asked in forms for one in asked.variants(weight))


class Shorter(Form):
    """The same GEMM, shorter on one side, as is the side of another weight that it meets there."""

    @abstractmethod
    def shortens(self, weight: Weight) -> Side | None: ...

    def copies(self, weight: Weight) -> int:
        """How many vectors of the dim lie one after the other on that side."""
        return 1

    def takes(self, weight: Weight) -> bool:
        return self.shortens(weight) is not None

    def full(self, weight: Weight) -> int:
        length = weight.out_features if self.shortens(weight) == "out" else weight.in_features
        return length // self.copies(weight)

    def params(self, weight: Weight, dim: int) -> int:
        return math.prod(self._sides(weight, dim))

    def operation(self, weight: Weight, dim: int, rows: int) -> Operation:
        return linear(rows, *self._sides(weight, dim))

    def size(self, weight: Weight, dim: int) -> int:
        return self.copies(weight) * dim

    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        return ModuleSpec("Linear", dict(zip(("in_features", "out_features"), self._sides(weight, dim), strict=True)))

    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        at = ends(dim, self.copies(weight))
        if self.shortens(weight) == "in":
            return (Place("weight", 1, at),)
        return Place("weight", 0, at), Place("bias", 0, at)

    def axis(self, weight: Weight) -> str:
        return "n" if self.shortens(weight) == "out" else "k"

    def fused(self, weight: Weight, dim: int) -> int:
        assert self.shortens(weight) == "out", f"{weight.name} is shorter on the side of its input"
        return self.size(weight, dim)

    def cached(self, weight: Weight, dim: int) -> int:
        shorter = weight.cached and self.shortens(weight) == "out"
        return self.size(weight, dim) if shorter else weight.kept

    def _sides(self, weight: Weight, dim: int) -> tuple[int, int]:
        """Its inputs and its outputs at this dim."""
        size = self.size(weight, dim)
        return (weight.in_features, size) if self.shortens(weight) == "out" else (size, weight.out_features)
