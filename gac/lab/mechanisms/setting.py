"""An axis of an operator in a number format, the sides of its GEMMs, and the alignment of their rows.

Memory is read in sectors of 32 bytes, and a thread loads at most 16 bytes at once (CUDA C++ Best Practices Guide,
"Coalesced Access to Global Memory"; CUDA C++ Programming Guide, "Device Memory Accesses").
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gac.profiling.operators import ITEM_BYTES, OPERATORS, numbers_of
from gac.profiling.records import Launch
from gac.schemes import Scheme, scheme_timed_as

SECTOR = 32
VECTOR = 16
CACHE_LINE = 128

SDPA: frozenset[str] = frozenset(name for name in OPERATORS.names if name.startswith("sdpa"))
LATENT_ATTENTION: frozenset[str] = frozenset(name for name in OPERATORS.names if name.startswith("latent_attention"))


ROWS: Mapping[tuple[str, str], str] = MappingProxyType(
    {(operator.name, axis): sides for operator in OPERATORS for axis, sides in operator.gemm_sides.items()}
)
"""(operator, axis) to its sides in the GEMMs: ``k`` (rows of both operands) and ``n`` (rows of the result).

The number of rows (m, b, h, s, t) is never one. Bucketed and padded heads are rounded up to multiples of 8 before they
run, so their dims are not either; and the result of one row has no second row that could be misaligned."""


def natural_axis(operator: str) -> str:
    """Axis that compression moves: a rank, a head_dim, the k of a GEMM, or the columns of a collective.

    Raises:
        ProfileError: the operator is unknown.
    """
    return OPERATORS.get(operator).compressed_axis


def parse_capability(compute_capability: str) -> tuple[int, int]:
    """Major and minor number of a compute capability."""
    major, _, minor = compute_capability.partition(".")
    return int(major), int(minor)


@dataclass(frozen=True)
class Setting:
    """All that a rule needs to know besides the dim.

    Attributes:
        dtype: ``bf16``, ``fp16`` or ``fp8``, or the dtype of a scheme that stores its weights quantised.
        compute_capability: ``"9.0"``; None where no GPU is named.
        shared_bytes: shared memory that a CTA may have; None where not known.
        launches: recorded at the dim, in order; empty where nothing was.
        fixed: sizes of the other axes; empty where they are not known.
    """

    operator: str
    axis: str
    dtype: str
    compute_capability: str | None = None
    shared_bytes: int | None = None
    launches: tuple[Launch, ...] = ()
    fixed: tuple[tuple[str, int], ...] = ()

    def sizes(self, dim: int) -> dict[str, int]:
        """Known sizes by axis, with this dim."""
        return dict(self.fixed) | {self.axis: dim}

    @property
    def sides(self) -> str:
        """``k``, ``n`` or both, by the side of a GEMM that the axis is; empty where it only counts rows."""
        return ROWS.get((self.operator, self.axis), "")

    @property
    def is_math(self) -> bool:
        """True for PyTorch's math attention: GEMMs, a softmax and copies, in float32, without Tensor Cores."""
        return self.operator.startswith("sdpa_math")

    @property
    def element_bytes(self) -> int:
        """Bytes of an element that the kernels read: of the activations where weights are quantised."""
        return ITEM_BYTES["fp32" if self.is_math else numbers_of(self.dtype)]

    @property
    def scheme(self) -> Scheme | None:
        """Scheme whose storage holds the weights and has kernels of its own; None where there is none."""
        return None if self.dtype in ITEM_BYTES else scheme_timed_as(self.dtype)

    def row_bytes(self, dim: int) -> int:
        return dim * self.element_bytes


def row_alignment(row_bytes: int, largest: int = CACHE_LINE) -> int:
    """Largest power of two, up to ``largest`` bytes, at whose multiples every row of a packed matrix starts."""
    return min(row_bytes & -row_bytes, largest)
