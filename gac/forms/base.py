"""The seam of forms: what one integer makes of a weight."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from gac.models.weights import Weight
from gac.operations import Operation, linear


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
