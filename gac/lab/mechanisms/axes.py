"""Which axes lie along the rows of a matrix: the ones whose size decides how those rows are aligned."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gac.profiling.operators import ITEM_BYTES, OPERATORS, numbers_of
from gac.profiling.records import Launch
from gac.schemes import Scheme, scheme_timed_as

SDPA: frozenset[str] = frozenset(name for name in OPERATORS.names if name.startswith("sdpa"))
"""The attention operators."""

LATENTS: frozenset[str] = frozenset(name for name in OPERATORS.names if name.startswith("latent_attention"))
"""Attention over latents, in a kernel of ours."""

ROWS: Mapping[tuple[str, str], str] = MappingProxyType(
    {(operator.name, axis): sides for operator in OPERATORS for axis, sides in operator.gemm_sides.items()}
)
"""(operator, axis) to its sides in the GEMMs: ``k`` (rows of both operands) and ``n`` (rows of the result).

The number of rows (m, b, h, s, t) is never one. Bucketed and padded heads are rounded up to multiples of 8 before they
run, so their dims are not either; and the result of one row has no second row that could be misaligned."""


def natural_axis(operator: str) -> str:
    """Return the axis that compression moves: a rank, a head_dim, the k of a GEMM, or the columns of a collective.

    Raises:
        ProfileError: the operator is unknown.
    """
    return OPERATORS.get(operator).compressed_axis


def is_math(operator: str) -> bool:
    """Whether it is attention by the math backend: GEMMs, a softmax and copies, in float32, without Tensor Cores."""
    return operator.startswith("sdpa_math")


def version(compute_capability: str) -> tuple[int, int]:
    """Major and minor number of a compute capability."""
    major, _, minor = compute_capability.partition(".")
    return int(major), int(minor)


@dataclass(frozen=True)
class Setting:
    """What a rule needs to know besides the dim.

    Attributes:
        operator: name of the operator.
        axis: the axis that the dim is on.
        dtype: ``bf16``, ``fp16`` or ``fp8``, or that of a scheme, whose weights are in a storage.
        compute_capability: ``"9.0"``; None where no GPU is named.
        shared_bytes: shared memory that one CTA may have; None where not known.
        ran: what was recorded at the dim, in order; empty where nothing was.
        fixed: sizes of the other axes; empty where they are not known.
    """

    operator: str
    axis: str
    dtype: str
    compute_capability: str | None = None
    shared_bytes: int | None = None
    ran: tuple[Launch, ...] = ()
    fixed: tuple[tuple[str, int], ...] = ()

    def sizes(self, dim: int) -> dict[str, int]:
        """The sizes that are known, with this one."""
        return dict(self.fixed) | {self.axis: dim}

    @property
    def sides(self) -> str:
        """Whether the axis is ``k`` or ``n`` of a GEMM, or both; empty where it only counts rows."""
        return ROWS.get((self.operator, self.axis), "")

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the matrices that the kernels read: PyTorch's math attention computes in float32.

        Where weights are in a storage, of an element of the activations.
        """
        return ITEM_BYTES["fp32" if is_math(self.operator) else numbers_of(self.dtype)]

    @property
    def scheme(self) -> Scheme | None:
        """The scheme in whose storage weights are, which has kernels of its own; None: in none."""
        return None if self.dtype in ITEM_BYTES else scheme_timed_as(self.dtype)

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of so many elements."""
        return dim * self.element_bytes
