"""What the rules look at: whether they concern an axis, whether a dim keeps them, and the numbers behind that."""

from collections.abc import Callable
from math import prod

from gac.profiling.mechanisms.axes import SDPA, is_math
from gac.profiling.mechanisms.kernels import Kernel, describe
from gac.profiling.mechanisms.rule import Setting
from gac.profiling.mechanisms.sectors import VECTOR, bank_conflicts, fetched_over_used, vector_bytes
from gac.profiling.mechanisms.tiles import (
    BLOCK_COLS,
    BLOCK_ROWS,
    RETIRED,
    TEMPLATES,
    AttentionTile,
    flash_tile,
    shared_limit,
    template_for,
)
from gac.profiling.records import Launch

WARP = 32

TOLERATED_PADDING = 0.15
"""A template may be this much larger than the head_dim: from here on the study calls the padding waste."""

# --- which operators ------------------------------------------------------------------------------------------------


def head_dim(*backends: str) -> Callable[[Setting], bool]:
    """Head_dim of attention with one of these backends (empty: PyTorch chooses), causal or not."""
    names = {f"sdpa{'_' if backend else ''}{backend}{causal}" for backend in backends for causal in ("", "_causal")}
    assert names <= SDPA
    return lambda setting: setting.axis == "d" and setting.operator in names


def rows(setting: Setting) -> bool:
    return bool(setting.sides)


def gemm(setting: Setting) -> bool:
    """GEMMs that cuBLAS runs: all but the fused kernels for INT4 and attention, and element-wise copies."""
    fused = setting.operator in SDPA and not is_math(setting.operator)
    return not fused and setting.operator not in {"copy", "int4_linear"}


def gemm_rows(setting: Setting) -> bool:
    return gemm(setting) and rows(setting)


def tensor_core_rows(setting: Setting) -> bool:
    """Rows that Tensor Cores work on: not those of math attention, whose GEMMs are in float32."""
    return rows(setting) and not is_math(setting.operator)


def tma_rows(setting: Setting) -> bool:
    """Rows that a Hopper kernel would read by TMA: cuBLAS's GEMMs, and attention where cuDNN serves it."""
    return (gemm_rows(setting) and tensor_core_rows(setting)) or head_dim("", "cudnn")(setting)


def wgmma_rows(setting: Setting) -> bool:
    return tma_rows(setting) and "n" in setting.sides


def launched(setting: Setting) -> bool:
    return setting.operator != "copy"


def fp8(setting: Setting) -> bool:
    return setting.dtype == "fp8" and rows(setting)


# --- what each asks -------------------------------------------------------------------------------------------------


def _row_bytes(dim: int, setting: Setting) -> int:
    return dim * setting.element_bytes


def untold(_dim: int, _setting: Setting) -> None:
    return None


def aligned_rows(divisor: int) -> Callable[[int, Setting], bool]:
    return lambda dim, setting: _row_bytes(dim, setting) % divisor == 0


def multiple_of_8(dim: int, _setting: Setting) -> bool:
    return dim % 8 == 0


def is_template(dim: int, setting: Setting) -> bool | None:
    if not by_flash(setting):
        return None
    recorded = _recorded_flash(setting)
    if recorded is not None:
        return dim == recorded[1].template_head_dim
    return None if dim in RETIRED else dim in TEMPLATES


def little_padding(dim: int, setting: Setting) -> bool | None:
    if not by_flash(setting):
        return None
    template = _template(dim, setting)
    return template is not None and 1 - dim / template < TOLERATED_PADDING


def whole_mma(dim: int, setting: Setting) -> bool:
    """An instruction takes 32 bytes of k (16 elements of 2 bytes, 32 of FP8) and 8 columns of n."""
    whole_k = "k" not in setting.sides or _row_bytes(dim, setting) % 32 == 0
    return whole_k and ("n" not in setting.sides or dim % 8 == 0)


def multiple_of_16(dim: int, _setting: Setting) -> bool:
    return dim % 16 == 0


def fitting_tile(dim: int, setting: Setting) -> bool | None:
    if not by_flash(setting):
        return None
    if _template(dim, setting) is None:
        return False
    asked, limit = _asked(dim, setting), _limit(setting)
    return None if asked is None or limit is None else asked[1] <= limit


def _limit(setting: Setting) -> int | None:
    if setting.shared_bytes is not None:
        return setting.shared_bytes
    return None if setting.compute_capability is None else shared_limit(setting.compute_capability)


# --- FlashAttention-2, by the record or by its source ---------------------------------------------------------------

_NAMES = {"cudnn attention": "cuDNN", "mem-efficient": "the memory-efficient kernel"}


def by_flash(setting: Setting) -> bool:
    """Whether FlashAttention-2 serves attention: unless another backend was recorded."""
    return _other_backend(setting) is None


def by_other(setting: Setting) -> str:
    """What served attention instead of FlashAttention-2."""
    return f"{_other_backend(setting)} served it"


def _other_backend(setting: Setting) -> str | None:
    found = _attention(setting)
    if found is not None:
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
    return template_for(dim) if recorded is None else recorded[1].template_head_dim


def _asked(dim: int, setting: Setting) -> tuple[AttentionTile, int] | None:
    """The tile and the shared memory that a launch asks for: as recorded, else by FlashAttention's source."""
    recorded = _recorded_flash(setting)
    if recorded is not None:
        launch, kernel = recorded
        assert kernel.template_head_dim is not None, "a flash kernel's name tells its template"
        assert kernel.tile is not None, "a flash kernel's name tells its tile"
        warps = prod(launch.block) // WARP
        return AttentionTile(kernel.template_head_dim, *kernel.tile, warps=warps), launch.shared_bytes
    template, limit = template_for(dim), _limit(setting)
    if template is None or limit is None or setting.compute_capability is None:
        return None
    causal = setting.operator.endswith("_causal")
    tile = flash_tile(template, setting.compute_capability, limit, causal=causal)
    return tile, tile.shared


# --- the numbers behind it ------------------------------------------------------------------------------------------


def say_backend(dim: int, _setting: Setting) -> str:
    if dim % 8 == 0:
        return f"{dim} = 8 x {dim // 8}: every backend takes it (up to its largest head_dim)"
    return f"{dim} is not a multiple of 8: only flash and math take it, flash after copies padded to {dim + -dim % 8}"


def say_template(dim: int, setting: Setting) -> str:
    if not by_flash(setting):
        return by_other(setting)
    template = _template(dim, setting)
    if template is None:
        return f"{dim} is larger than the largest template, {TEMPLATES[-1]}"
    if dim in RETIRED and _recorded_flash(setting) is None:
        larger = template_for(dim + 1)
        return f"older releases have a template for {dim}, newer ones serve it with {larger}; the kernel's name tells"
    return f"the template for {template} serves {dim}: {1 - dim / template:.1%} of its work is padding"


def say_async(dim: int, setting: Setting) -> str:
    size = _row_bytes(dim, setting)
    width = vector_bytes(size)
    how = "plain loads instead of cp.async" if width < 4 else f"cp.async of {width} bytes"
    return f"rows of {size} bytes: {how}"


def say_rows(dim: int, setting: Setting) -> str:
    size = _row_bytes(dim, setting)
    rest = f"{size % VECTOR} past a multiple of 16" if size % VECTOR else "a multiple of 16"
    return f"rows of {size} bytes, {rest}"


def say_tier(dim: int, setting: Setting) -> str:
    elements = vector_bytes(_row_bytes(dim, setting)) // setting.element_bytes
    return (
        f"rows begin at multiples of {max(elements, 1)} element{'s' if elements > 1 else ''}: align{max(elements, 1)}"
    )


def say_vector(dim: int, setting: Setting) -> str:
    size = _row_bytes(dim, setting)
    return f"rows of {size} bytes: loads of {vector_bytes(size)} bytes"


def say_sector(dim: int, setting: Setting) -> str:
    size = _row_bytes(dim, setting)
    return f"rows of {size} bytes: {fetched_over_used(size):.3f} bytes fetched a byte used, each row read on its own"


def say_mma(dim: int, setting: Setting) -> str:
    step = 32 // setting.element_bytes
    parts = [f"{dim} % {step} = {dim % step} along k"] if "k" in setting.sides else []
    return " and ".join([*parts, *([f"{dim} % 8 = {dim % 8} along n"] if "n" in setting.sides else [])])


def say_wgmma(dim: int, _setting: Setting) -> str:
    return f"{dim} % 8 = {dim % 8}: {-dim % 8} columns of padding"


def say_fp8(dim: int, _setting: Setting) -> str:
    return f"{dim} % 16 = {dim % 16}"


def say_kernel(_dim: int, _setting: Setting) -> str:
    return "which kernel the library chooses shows in the recorded names only"


def say_waves(_dim: int, _setting: Setting) -> str:
    return "the number of tiles follows from the kernel's tile, so it shows in the record only"


def say_budget(dim: int, setting: Setting) -> str:
    if not by_flash(setting):
        return by_other(setting)
    if _template(dim, setting) is None:
        return f"{dim} is larger than the largest template, {TEMPLATES[-1]}"
    asked, limit = _asked(dim, setting), _limit(setting)
    if asked is None or limit is None:
        return "the GPU's shared memory is not known"
    tile, shared = asked
    source = "recorded" if setting.ran else "in the source"
    full = (tile.rows, tile.cols) == (BLOCK_ROWS, BLOCK_COLS[0])
    return (
        f"{tile.rows}x{tile.cols} tile of {tile.warps} warps ({source}): Q, K and V take {shared // 1024} of "
        f"{limit // 1024} KiB" + ("" if full else f"; {tile.total // 1024} KiB with scores and output, in registers")
    )


def say_banks(dim: int, setting: Setting) -> str:
    template = _template(dim, setting)
    size = (template or dim) * setting.element_bytes
    ways = bank_conflicts(size)
    return (
        f"eight rows of {size} bytes would take {ways} passes; the libraries swizzle them, so kernels should take one"
    )
