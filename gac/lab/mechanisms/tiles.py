"""The tiles of FlashAttention-2's forward kernels, their bytes, and the study's heuristic for why they shrink.

A CTA keeps a block of query rows and walks over blocks of keys and values. Q, K and V lie in shared memory, and their
bytes are what a launch asks for; the scores and the accumulator lie in registers, spread over the warps of the CTA.
Which tile a template has is written in its source (``flash_tile``). The published A100 study explains the shrinking
tiles by charging all five operands to one budget (``widest_tile``): that reproduces its table, though registers are no
shared memory, and it is not how the source chooses: at 192 the source keeps 64 keys by doubling the warps.
"""

from dataclasses import dataclass

from gac.profiling.operators.attention import FLASH_TEMPLATES

RETIRED = (160, 224)
"""Templates that newer releases (and the PyTorch versions built on them) no longer have; the next larger one serves."""

BLOCK_ROWS = 128
BLOCK_COLS = (128, 64, 32)

RESERVED = 1024
"""Bytes of an SM's shared memory that the system keeps for itself for every CTA (compute capability 8.0 and later)."""


@dataclass(frozen=True)
class AttentionTile:
    """The operands of one step of a FlashAttention-2 forward pass: q, k and v of two bytes, the others of four.

    Attributes:
        head_dim: of the template.
        rows: query rows of a CTA.
        cols: keys of one step.
        warps: of a CTA, which share the rows.
    """

    head_dim: int
    rows: int
    cols: int
    warps: int = 4

    @property
    def shared(self) -> int:
        """What lies in shared memory, as a launch of the kernel reports it: the bytes of Q, K and V."""
        return 2 * self.head_dim * (self.rows + 2 * self.cols)

    @property
    def total(self) -> int:
        """All five operands, whether they lie in shared memory or in registers: what the study's heuristic counts."""
        scores, accumulator = self.rows * self.cols, self.rows * self.head_dim
        return self.shared + 4 * (scores + accumulator)


def template_for(head_dim: int) -> int | None:
    """The smallest template that holds the head_dim; None where it is larger than every template."""
    return min((template for template in FLASH_TEMPLATES if template >= head_dim), default=None)


def version(compute_capability: str) -> tuple[int, int]:
    """Major and minor number of a compute capability."""
    major, _, minor = compute_capability.partition(".")
    return int(major), int(minor)


# --- what the source says -------------------------------------------------------------------------------------------

_TILES = {32: (128, 128, 4), 64: (128, 128, 4), 96: (128, 64, 4), 128: (128, 64, 4), 160: (128, 32, 4)}
"""Query rows, keys and warps by template; from 192 on see ``_wide``."""

_SM8X = {96: (128, 64, 4), 128: (128, 32, 4), 160: (128, 64, 8)}
_SM8X_CAUSAL = dict.fromkeys((96, 128, 160), (64, 64, 4))
"""Where compute capability 8.6, 8.7 and 8.9 differ from that."""


def flash_tile(template: int, compute_capability: str, limit: int, *, causal: bool = False) -> AttentionTile:
    """The tile of a template's forward kernel (two-byte elements, no dropout, keys not split between CTAs).

    Source: FlashAttention's ``flash_fwd_launch_template.h``, ``run_mha_fwd_hdim32`` to ``run_mha_fwd_hdim256``, and
    PyTorch's copy of it, which still had 160 and 224.

    Args:
        template: one of ``FLASH_TEMPLATES``.
        limit: bytes of shared memory that one CTA may have.
    """
    major, minor = version(compute_capability)
    rows, cols, warps = _TILES[template] if template in _TILES else _wide(template, limit)
    if major == 8 and minor > 0:
        rows, cols, warps = (_SM8X_CAUSAL if causal else _SM8X).get(template, (rows, cols, warps))
    return AttentionTile(template, rows, cols, warps=warps)


def _wide(template: int, limit: int) -> tuple[int, int, int]:
    """224 and 256 look at the shared memory: 128 rows where they fit, but at 256 not where two CTAs of 64 rows do."""
    wide, narrow = (128, 64, 8), (64, 64, 4)
    if template == 192:
        return wide
    fit = limit >= AttentionTile(template, *wide[:2]).shared
    two = limit + RESERVED >= 2 * AttentionTile(template, *narrow[:2]).shared
    return wide if fit and not (template == 256 and two) else narrow


# --- the study's heuristic ------------------------------------------------------------------------------------------


def widest_tile(head_dim: int, limit: int) -> AttentionTile:
    """The widest block of keys with which all five operands fit into ``limit`` bytes, for the template of a head_dim.

    Where none fits, the narrowest. (FlashAttention-2, Dao 2023, arXiv 2307.08691, section 3.3, names both limits,
    shared memory and registers, as what block sizes are tuned against.)
    """
    template = template_for(head_dim)
    assert template is not None, "no template serves a head_dim above 256"
    tiles = [AttentionTile(template, BLOCK_ROWS, cols) for cols in BLOCK_COLS]
    return next((tile for tile in tiles if tile.total <= limit), tiles[-1])
