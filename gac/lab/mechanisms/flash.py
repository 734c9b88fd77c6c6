"""FlashAttention-2's forward kernels: their tiles and bytes, and what the rules about them look at.

A CTA keeps a block of query rows and walks over blocks of keys and values. Q, K and V lie in shared memory, and their
bytes are what a launch asks for; the scores and the accumulator lie in registers, spread over the warps of the CTA.
Which tile a template has is written in its source (``flash_tile``). The published A100 study explains the shrinking
tiles by charging all five operands to one budget (``widest_tile``): that reproduces its table, though registers are no
shared memory, and it is not how the source chooses: at 192 the source keeps 64 keys by doubling the warps. The rules go
by the record of the dim where there is one, else by the source.
"""

from dataclasses import dataclass
from math import prod

from gac.lab.mechanisms.axes import Setting, version
from gac.lab.mechanisms.sectors import RESERVED, bank_conflicts
from gac.profiling.kernel_names import Kernel, describe
from gac.profiling.operators.attention import FLASH_TEMPLATES
from gac.profiling.records import Launch

RETIRED = (160, 224)
"""Templates that newer releases (and the PyTorch versions built on them) no longer have; the next larger one serves."""

BLOCK_ROWS = 128
BLOCK_COLS = (128, 64, 32)


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


# --- what the rules look at -------------------------------------------------------------------------------------------

WARP = 32

TOLERATED_PADDING = 0.15
"""A template may be this much larger than the head_dim: from here on the study calls the padding waste."""

_NAMES = {"cudnn attention": "cuDNN", "mem-efficient": "the memory-efficient kernel"}
_TOO_LARGE = f"{{}} is larger than the largest template, {FLASH_TEMPLATES[-1]}"

# --- what each asks -------------------------------------------------------------------------------------------------


def is_template(dim: int, setting: Setting) -> bool | None:
    if recorded := _recorded_flash(setting):
        return dim == recorded[1].template_d
    return None if dim in RETIRED else dim in FLASH_TEMPLATES


def little_padding(dim: int, setting: Setting) -> bool:
    template = _template(dim, setting)
    return template is not None and 1 - dim / template < TOLERATED_PADDING


def fitting_tile(dim: int, setting: Setting) -> bool | None:
    if _template(dim, setting) is None:
        return False
    asked = _asked(dim, setting)
    return None if asked is None or setting.shared_bytes is None else asked[1] <= setting.shared_bytes


# --- the numbers behind it ------------------------------------------------------------------------------------------


def say_template(dim: int, setting: Setting) -> str:
    template, recorded = _template(dim, setting), _recorded_flash(setting)
    if template is None:
        return _TOO_LARGE.format(dim)
    if dim in RETIRED and recorded is None:
        larger = template_for(dim + 1)
        return f"older releases have a template for {dim}, newer ones serve it with {larger}; the kernel's name tells"
    even = None if recorded is None else recorded[1].even_k
    said = "" if even is None else f"; it ran with is_even_K {str(even).lower()}"
    return f"the template for {template} serves {dim}: {1 - dim / template:.1%} of its work is padding{said}"


def say_budget(dim: int, setting: Setting) -> str:
    if _template(dim, setting) is None:
        return _TOO_LARGE.format(dim)
    asked, limit = _asked(dim, setting), setting.shared_bytes
    if asked is None or limit is None:
        return "the GPU's shared memory is not known"
    tile, shared = asked
    source = "in the source" if _recorded_flash(setting) is None else "recorded"
    full = (tile.rows, tile.cols) == (BLOCK_ROWS, BLOCK_COLS[0])
    return (
        f"{tile.rows}x{tile.cols} tile of {tile.warps} warps ({source}): Q, K and V take {shared // 1024} of "
        f"{limit // 1024} KiB" + ("" if full else f"; {tile.total // 1024} KiB with scores and output, in registers")
    )


def say_banks(dim: int, setting: Setting) -> str:
    size = setting.row_bytes(_template(dim, setting) or dim)
    ways = bank_conflicts(size)
    return (
        f"eight rows of {size} bytes would take {ways} passes; the libraries swizzle them, so kernels should take one"
    )


# --- what served, with which tile -----------------------------------------------------------------------------------


def other_backend(setting: Setting) -> str | None:
    """What was recorded to serve attention instead of FlashAttention-2; None where nothing was."""
    if found := _attention(setting):
        return _NAMES.get(found[1].family)
    return "the math backend" if any(describe(launch.name).main for launch in setting.ran) else None


def _attention(setting: Setting) -> tuple[Launch, Kernel] | None:
    """The attention kernel that was recorded at the dim."""
    kernels = ((launch, describe(launch.name)) for launch in setting.ran)
    return next((pair for pair in kernels if pair[1].role == "attention"), None)


def _recorded_flash(setting: Setting) -> tuple[Launch, Kernel] | None:
    found = _attention(setting)
    return found if found is not None and found[1].family == "flash" else None


def _template(dim: int, setting: Setting) -> int | None:
    recorded = _recorded_flash(setting)
    return template_for(dim) if recorded is None else recorded[1].template_d


def _asked(dim: int, setting: Setting) -> tuple[AttentionTile, int] | None:
    """The tile and the shared memory that a launch asks for: as recorded, else by FlashAttention's source."""
    if recorded := _recorded_flash(setting):
        launch, kernel = recorded
        assert kernel.template_d is not None, "a flash kernel's name tells its template"
        assert kernel.tile is not None, "a flash kernel's name tells its tile"
        warps = prod(launch.block) // WARP
        return AttentionTile(kernel.template_d, *kernel.tile, warps=warps), launch.shared_bytes
    template = template_for(dim)
    if template is None or setting.shared_bytes is None or setting.compute_capability is None:
        return None
    causal = setting.operator.endswith("_causal")
    tile = flash_tile(template, setting.compute_capability, setting.shared_bytes, causal=causal)
    return tile, tile.shared
