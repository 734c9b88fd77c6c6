"""The checks of the rules: whether they apply to an axis, whether a dim keeps them, and the numbers behind that."""

from collections.abc import Callable

from gac.lab.mechanisms.axes import LATENTS, SDPA, Setting, is_math
from gac.lab.mechanisms.sectors import VECTOR, fetched_over_used, vector_bytes
from gac.runtime import limits as kernel_limits
from gac.runtime.limits import ALIGNED

# --- which operators ------------------------------------------------------------------------------------------------


def head_dim(*backends: str) -> Callable[[Setting], bool]:
    """Head_dim of attention with one of these backends (empty: PyTorch chooses), causal or not."""
    names = {f"sdpa{'_' if backend else ''}{backend}{causal}" for backend in backends for causal in ("", "_causal")}
    assert names <= SDPA
    return lambda setting: setting.axis == "d" and setting.operator in names


def latents(setting: Setting) -> bool:
    """Ranks of latents, and the length of the heads that are rebuilt from them."""
    return setting.operator in LATENTS and setting.axis in ("k", "v", "d")


def rows(setting: Setting) -> bool:
    return bool(setting.sides)


def gemm(setting: Setting) -> bool:
    """GEMMs that cuBLAS runs: all but kernels for storages, INT4, one row and attention, and element-wise copies."""
    fused = setting.operator in LATENTS or (setting.operator in SDPA and not is_math(setting.operator))
    return not fused and setting.scheme is None and setting.operator not in {"copy", "int4_linear"}


def gemm_rows(setting: Setting) -> bool:
    return gemm(setting) and rows(setting)


def tensor_core_rows(setting: Setting) -> bool:
    """Rows that Tensor Cores work on: not those of math attention, whose GEMMs are in float32, nor of a single row."""
    return rows(setting) and not is_math(setting.operator)


def tma_rows(setting: Setting) -> bool:
    """Rows that a Hopper kernel would read by TMA: cuBLAS's GEMMs, and attention where cuDNN serves it."""
    return (gemm_rows(setting) and tensor_core_rows(setting)) or head_dim("", "cudnn")(setting)


# --- what each asks -------------------------------------------------------------------------------------------------


def untold(_dim: int, _setting: Setting) -> None:
    return None


def aligned_rows(divisor: int) -> Callable[[int, Setting], bool]:
    return lambda dim, setting: setting.row_bytes(dim) % divisor == 0


def multiple_of(step: int) -> Callable[[int, Setting], bool]:
    return lambda dim, _setting: dim % step == 0


def attended(dim: int, setting: Setting) -> bool:
    """Whether the kernel takes latents of this rank, or heads of this length."""
    return unattended(dim, setting) is None


def unattended(dim: int, setting: Setting) -> str | None:
    """Why it does not; None where it does."""
    size, k_rank, v_rank = (dim if setting.axis == axis else ALIGNED for axis in ("d", "k", "v"))
    return kernel_limits.latents(size, k_rank, v_rank)


def whole_mma(dim: int, setting: Setting) -> bool:
    """An instruction takes 32 bytes of k (16 elements of 2 bytes, 32 of FP8) and 8 columns of n."""
    whole_k = "k" not in setting.sides or setting.row_bytes(dim) % 32 == 0
    return whole_k and ("n" not in setting.sides or dim % 8 == 0)


# --- the numbers behind it ------------------------------------------------------------------------------------------


def say_backend(dim: int, _setting: Setting) -> str:
    if dim % 8 == 0:
        return f"{dim} = 8 x {dim // 8}: every backend takes it (up to its largest head_dim)"
    return f"{dim} is not a multiple of 8: only flash and math take it, flash after copies padded to {dim + -dim % 8}"


def say_latents(dim: int, setting: Setting) -> str:
    reason = unattended(dim, setting)
    if reason is None:
        return f"{dim} = {ALIGNED} x {dim // ALIGNED}: read 16 bytes at a time"
    return f"{reason}: PyTorch rebuilds the keys and values of all tokens in every step"


def say_async(dim: int, setting: Setting) -> str:
    size = setting.row_bytes(dim)
    width = vector_bytes(size)
    how = "plain loads instead of cp.async" if width < 4 else f"cp.async of {width} bytes"
    return f"rows of {size} bytes: {how}"


def say_rows(dim: int, setting: Setting) -> str:
    size = setting.row_bytes(dim)
    rest = f"{size % VECTOR} past a multiple of 16" if size % VECTOR else "a multiple of 16"
    return f"rows of {size} bytes, {rest}"


def say_vector(dim: int, setting: Setting) -> str:
    size = setting.row_bytes(dim)
    return f"rows of {size} bytes: loads of {vector_bytes(size)} bytes"


def say_sector(dim: int, setting: Setting) -> str:
    size = setting.row_bytes(dim)
    return f"rows of {size} bytes: {fetched_over_used(size):.3f} bytes fetched a byte used, each row read on its own"


def say_tier(dim: int, setting: Setting) -> str:
    elements = max(vector_bytes(setting.row_bytes(dim)) // setting.element_bytes, 1)
    return f"rows begin at multiples of {elements} element{'s' if elements > 1 else ''}: align{elements}"


def say_mma(dim: int, setting: Setting) -> str:
    steps = {"k": 32 // setting.element_bytes, "n": 8}
    sides = [side for side in steps if side in setting.sides]
    return " and ".join(f"{dim} % {steps[side]} = {dim % steps[side]} along {side}" for side in sides)
