"""What an operator is: named axes, operands, arithmetic, traffic, and the shapes its libraries refuse."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

Axes = Mapping[str, int]

ITEM_BYTES: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp16": 2, "fp8": 1, "fp32": 4, "int32": 4, "uint8": 1})


@dataclass(frozen=True)
class Operand:
    """A contiguous tensor that a launch reads or writes.

    Attributes:
        shape: sizes, slowest axis first.
        dtype: a name in ``ITEM_BYTES``.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Operator:
    """One operator over named axes.

    Attributes:
        name: what profiles call it.
        axes: names of its axes, in the order in which an operation gives them.
        dtypes: the dtypes that it can be timed in.
        reads: the axes of each tensor that one launch reads, as in ``m k``; activations first, then weights.
        writes: the axes of each tensor that it writes: intermediates first, the result or the results last.
        products: the axes of each GEMM, whose sizes multiply to its multiplications.
        runner: where its ``gac.profiling.timing.runners.Runner`` is, as ``module:class``.
    """

    name: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...] = ("bf16", "fp16")
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    products: tuple[str, ...] = ()
    runner: str

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        """What one launch reads: activations first, then weights, then scales."""
        return tuple(Operand(_sizes(names, axes), dtype) for names in self.reads)

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        """What one launch writes: intermediates first, the result or the results last."""
        return tuple(Operand(_sizes(names, axes), dtype) for names in self.writes)

    def flops(self, axes: Axes) -> int:
        """Floating-point operations that the result needs, a multiply-add counted as two."""
        return 2 * sum(math.prod(_sizes(names, axes)) for names in self.products)

    def bytes(self, axes: Axes, dtype: str) -> int:
        """The fewest bytes to move: every operand once."""
        return sum(operand.bytes for operand in (*self.inputs(axes, dtype), *self.outputs(axes, dtype)))

    def unmet(self, axes: Axes) -> str | None:
        """The condition that these sizes break, in words; None where they are an operation."""
        return None

    def refusal(self, axes: Axes, dtype: str) -> str | None:
        """The documented rule by which PyTorch refuses this shape, in words; None where none is known.

        It explains and predicts. What a device does with the shape is only known by running it.
        """
        return None


def _sizes(names: str, axes: Axes) -> tuple[int, ...]:
    return tuple(axes[name] for name in names.split())


def indivisible(axes: Axes, names: tuple[str, ...], divisor: int) -> str | None:
    """Which of these axes the divisor does not divide, as ``k = 107, n = 33``; None where it divides them all."""
    return ", ".join(f"{name} = {axes[name]}" for name in names if axes[name] % divisor) or None
