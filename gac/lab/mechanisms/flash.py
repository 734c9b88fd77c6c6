"""What the rules of FlashAttention-2 look at: by the record of the dim where there is one, else by the source."""

from math import prod

from gac.lab.mechanisms.axes import Setting
from gac.lab.mechanisms.sectors import bank_conflicts
from gac.lab.mechanisms.tiles import BLOCK_COLS, BLOCK_ROWS, RETIRED, AttentionTile, flash_tile, template_for
from gac.profiling.kernel_names import Kernel, describe
from gac.profiling.operators.attention import FLASH_TEMPLATES
from gac.profiling.records import Launch

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
