"""Why attention's tiles shrink as head_dim grows: the bytes of a FlashAttention-2 tile against an SM's shared memory.

A CTA keeps a block of query rows and walks over blocks of keys and values. Q, K and V lie in shared memory; the scores
and the accumulator lie in registers, but must be kept as well. The model charges all five to one budget, the shared
memory that a CTA may have, and takes the widest block of keys that fits. (FlashAttention-2, Dao 2023, arXiv 2307.08691,
section 3.3, names these two limits, shared memory and registers, as what block sizes are tuned against.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

TEMPLATES = (32, 64, 96, 128, 160, 192, 224, 256)
"""The head_dims that FlashAttention-2 was compiled for."""

RETIRED = (160, 224)
"""Templates that newer releases (and the PyTorch versions built on them) no longer have; the next larger one serves."""

BLOCK_ROWS = 128
BLOCK_COLS = (128, 64, 32)

_KIB = 1024
_SHARED_KIB = {
    (7, 0): 96,
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (12, 0): 99,
}
"""CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": shared memory of a thread block."""


@dataclass(frozen=True)
class AttentionTile:
    """The operands of one step of a FlashAttention-2 forward pass, in bytes.

    Attributes:
        head_dim: of the template.
        rows: query rows of a CTA.
        cols: keys of one step.
        element_bytes: of q, k and v; scores and accumulator are float32.
        stages: blocks of keys (and of values) that are held at once.
    """

    head_dim: int
    rows: int
    cols: int
    element_bytes: int = 2
    stages: int = 1

    @property
    def query(self) -> int:
        return self.rows * self.head_dim * self.element_bytes

    @property
    def key(self) -> int:
        return self.stages * self.cols * self.head_dim * self.element_bytes

    @property
    def value(self) -> int:
        return self.key

    @property
    def score(self) -> int:
        return self.rows * self.cols * 4

    @property
    def accumulator(self) -> int:
        return self.rows * self.head_dim * 4

    @property
    def shared(self) -> int:
        """What lies in shared memory, as a launch of the kernel reports it: Q, K and V."""
        return self.query + self.key + self.value

    @property
    def total(self) -> int:
        """All five tiles."""
        return self.shared + self.score + self.accumulator


def template_for(head_dim: int, templates: Sequence[int] = TEMPLATES) -> int | None:
    """The smallest template that holds the head_dim; None where it is larger than every template."""
    return min((template for template in templates if template >= head_dim), default=None)


def shared_limit(compute_capability: str) -> int | None:
    """Bytes of shared memory that one CTA may have; None for a capability that is not in the table."""
    major, _, minor = compute_capability.partition(".")
    kib = _SHARED_KIB.get((int(major), int(minor)))
    return None if kib is None else kib * _KIB


def widest_tile(head_dim: int, limit: int, element_bytes: int = 2) -> AttentionTile:
    """The tile of the template that serves a head_dim, with the widest block of keys that fits into ``limit`` bytes.

    Where none fits, the narrowest: the accumulator then needs more warps, or spills. See ``fits``.
    """
    template = template_for(head_dim)
    assert template is not None, "no template serves a head_dim above 256"
    tiles = [AttentionTile(template, BLOCK_ROWS, cols, element_bytes) for cols in BLOCK_COLS]
    return next((tile for tile in tiles if fits(tile, limit)), tiles[-1])


def fits(tile: AttentionTile, limit: int) -> bool:
    """Whether all five tiles together stay within ``limit`` bytes."""
    return tile.total <= limit
