"""Checks behind the rules: the axes that a rule applies to, whether a dim keeps it, and the numbers behind that."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from gac.lab.mechanisms.setting import (
    LATENT_ATTENTION,
    SDPA,
    SECTOR,
    VECTOR,
    Setting,
    row_alignment,
)
from gac.profiling.kernel_names import Kernel, describe
from gac.profiling.operators import OPERATORS
from gac.profiling.operators.attention import FLASH_TEMPLATES
from gac.profiling.records import Launch
from gac.runtime import limits as kernel_limits
from gac.runtime.limits import ALIGNED

AppliesTo = Callable[[Setting], bool]
Holds = Callable[[int, Setting], bool | None]
Detail = Callable[[int, Setting], str]


class Check(NamedTuple):
    """``holds`` gives None where the dim alone does not tell, and the recorded kernels could."""

    applies_to: AppliesTo
    holds: Holds
    detail: Detail


# --- axes ---


def is_head_dim(*backends: str) -> AppliesTo:
    """Head_dim of attention with one of these backends (empty: PyTorch chooses), causal or not."""
    names = {f"sdpa{'_' if backend else ''}{backend}{causal}" for backend in backends for causal in ("", "_causal")}
    assert names <= SDPA
    return lambda setting: setting.axis == "d" and setting.operator in names


def is_latent(setting: Setting) -> bool:
    """Ranks of latents, and the head_dim that is rebuilt from them."""
    return setting.operator in LATENT_ATTENTION and setting.axis in ("k", "v", "d")


def is_row(setting: Setting) -> bool:
    return bool(setting.sides)


def is_cublas(setting: Setting) -> bool:
    fused = setting.operator in LATENT_ATTENTION or (setting.operator in SDPA and not setting.is_math)
    return not fused and setting.scheme is None and setting.operator not in {"copy", "int4_linear"}


def is_cublas_row(setting: Setting) -> bool:
    return is_cublas(setting) and is_row(setting)


def is_tensor_core_row(setting: Setting) -> bool:
    return is_row(setting) and not setting.is_math


def is_tma_row(setting: Setting) -> bool:
    """Rows that a Hopper kernel would read by TMA: in cuBLAS's GEMMs, and in attention by cuDNN."""
    return (is_cublas_row(setting) and is_tensor_core_row(setting)) or is_head_dim("", "cudnn")(setting)


# --- rows and tiles ---


def _aligned_rows(applies_to: AppliesTo, divisor: int = VECTOR) -> Check:
    """Rows whose bytes are a multiple of the divisor."""

    def detail(dim: int, setting: Setting) -> str:
        size = setting.row_bytes(dim)
        return f"rows of {size} bytes, which start at multiples of {row_alignment(size)} bytes"

    return Check(applies_to, lambda dim, setting: setting.row_bytes(dim) % divisor == 0, detail)


def _multiples(applies_to: AppliesTo, step: int) -> Check:
    return Check(applies_to, lambda dim, _: dim % step == 0, lambda dim, _: f"{dim} % {step} = {dim % step}")


def _recorded(applies_to: AppliesTo, detail: str) -> Check:
    return Check(applies_to, lambda *_: None, lambda *_: detail)


def _fits_mma(dim: int, setting: Setting) -> bool:
    """An instruction takes 32 bytes of k (16 elements of 2 bytes, 32 of FP8) and 8 columns of n."""
    fits_k = "k" not in setting.sides or setting.row_bytes(dim) % 32 == 0
    return fits_k and ("n" not in setting.sides or dim % 8 == 0)


def _mma_detail(dim: int, setting: Setting) -> str:
    steps = {"k": 32 // setting.element_bytes, "n": 8}
    sides = [side for side in steps if side in setting.sides]
    return " and ".join(f"{dim} % {steps[side]} = {dim % steps[side]} along {side}" for side in sides)


# --- attention ---


def _latent_problem(dim: int, setting: Setting) -> str | None:
    return kernel_limits.latents(*(dim if setting.axis == axis else ALIGNED for axis in ("d", "k", "v")))


def _latent_detail(dim: int, setting: Setting) -> str:
    if (problem := _latent_problem(dim, setting)) is None:
        return f"{dim} = {ALIGNED} x {dim // ALIGNED}: read 16 bytes at a time"
    return f"{problem}: PyTorch rebuilds the keys and values of all tokens in every step"


RETIRED = (160, 224)  # templates that newer FlashAttention-2 releases no longer have; the next larger one serves
TOLERATED_PADDING = 0.15  # fraction of a template that may be padding: from here on the published study calls it waste

_BACKENDS = {"cudnn attention": "cuDNN", "mem-efficient": "the memory-efficient kernel"}


class Flash(NamedTuple):
    """FlashAttention-2 at a head_dim: its template (None: larger than all), and the recorded kernel, if any."""

    template: int | None
    kernel: Kernel | None = None
    launch: Launch | None = None


def template_for(head_dim: int) -> int | None:
    """Smallest template that holds the head_dim; None where it is larger than every template."""
    return min((template for template in FLASH_TEMPLATES if template >= head_dim), default=None)


def _flash_check(holds: Callable[[int, Flash], bool | None], detail: Callable[[int, Flash, Setting], str]) -> Check:

    def check(dim: int, setting: Setting) -> bool | None:
        flash = _flash(dim, setting)
        return holds(dim, flash) if isinstance(flash, Flash) else None

    def describe_dim(dim: int, setting: Setting) -> str:
        flash = _flash(dim, setting)
        if not isinstance(flash, Flash):
            return f"{flash} served it"
        too_large = f"{dim} is larger than the largest template, {FLASH_TEMPLATES[-1]}"
        return too_large if flash.template is None else detail(dim, flash, setting)

    return Check(is_head_dim("", "flash"), check, describe_dim)


def _flash(dim: int, setting: Setting) -> Flash | str:
    """The kernel of FlashAttention-2 that serves the dim, or the name of the backend that did."""
    kernels = [(describe(launch.name), launch) for launch in setting.launches]
    attention = next((pair for pair in kernels if pair[0].role == "attention"), None)
    if attention is None:
        return "the math backend" if any(kernel.main for kernel, _ in kernels) else Flash(template_for(dim))
    if attention[0].family == "flash":
        return Flash(attention[0].template_d, *attention)
    return _BACKENDS.get(attention[0].family) or Flash(template_for(dim))


def _is_template(dim: int, flash: Flash) -> bool | None:
    if flash.kernel is not None:
        return dim == flash.template
    return None if dim in RETIRED else dim in FLASH_TEMPLATES


def _has_little_padding(dim: int, flash: Flash) -> bool:
    return flash.template is not None and 1 - dim / flash.template < TOLERATED_PADDING


def _template_detail(dim: int, flash: Flash, _setting: Setting) -> str:
    assert flash.template is not None
    if dim in RETIRED and flash.kernel is None:
        larger = template_for(dim + 1)
        return f"older releases have a template for {dim}, newer ones serve it with {larger}; the kernel's name tells"
    even = None if flash.kernel is None else flash.kernel.even_k
    bounds = "" if even is None else f"; it ran with is_even_K {str(even).lower()}"
    return (
        f"the template for {flash.template} serves {dim}: {1 - dim / flash.template:.1%} of its work is padding{bounds}"
    )


def _tile_detail(_dim: int, flash: Flash, setting: Setting) -> str:
    if flash.kernel is None or flash.kernel.tile is None or flash.launch is None:
        return "FlashAttention-2 picks a tile that fits; a recorded kernel tells which"
    rows, columns = flash.kernel.tile
    limit = "" if setting.shared_bytes is None else f" of {setting.shared_bytes // 1024}"
    return f"{rows}x{columns} tile (recorded): Q, K and V take {flash.launch.shared_bytes // 1024}{limit} KiB"


# --- a scheme's own rules ---

_ANY_SIZE = 4096  # stands for a size that is not known: every scheme has an operator at it (``gac.testing.schemes``)


def _has_needs(setting: Setting) -> bool:
    return bool(setting.sides) and setting.scheme is not None and setting.scheme.shape_requirement is not None


def _has_kernel_limits(setting: Setting) -> bool:
    storage = None if setting.scheme is None else setting.scheme.storage
    return storage is not None and storage.limit is not None and _has_columns(setting)


def _has_groups(setting: Setting) -> bool:
    return setting.scheme is not None and setting.scheme.group is not None and _has_columns(setting)


def _has_operator(dim: int, setting: Setting) -> bool:
    operator = OPERATORS.get(setting.operator)
    return operator.refusal(dict.fromkeys(operator.axes, _ANY_SIZE) | setting.sizes(dim), setting.dtype) is None


def _operator_detail(dim: int, setting: Setting) -> str:
    assert setting.scheme is not None
    sizes = ", ".join(f"{axis} = {size}" for axis, size in setting.sizes(dim).items() if axis != "m")
    return f"scheme {setting.scheme.name} needs {setting.scheme.shape_requirement}: {sizes}"


def unreadable(dim: int, setting: Setting) -> str | None:
    """Why the kernels cannot read one of the matrices, and what runs instead; None where they read all known ones."""
    if (scheme := setting.scheme) is None:
        return None
    reason = next(filter(None, (scheme.kernel_unsupported_reason(*matrix) for matrix in _matrices(dim, setting))), None)
    return None if reason is None else f"{reason}: plain PyTorch unpacks it for every product"


def _groups_detail(dim: int, setting: Setting) -> str:
    assert setting.scheme is not None
    last = "; ".join(f"the last has {count}" for count in _ragged(dim, setting) if count)
    return f"{_columns_text(dim, setting)} in groups of {setting.scheme.group}{f': {last}' if last else ''}"


def _ragged(dim: int, setting: Setting) -> list[int]:
    assert setting.scheme is not None
    return [setting.scheme.ragged(columns) for _, columns in _matrices(dim, setting)]


def _columns_text(dim: int, setting: Setting) -> str:
    return f"{' and '.join(str(columns) for _, columns in _matrices(dim, setting))} columns"


def _has_columns(setting: Setting) -> bool:
    return bool(setting.sides) and any(_matrices(1, setting))


def _matrices(dim: int, setting: Setting) -> Iterator[tuple[int, int]]:
    operator, known = OPERATORS.get(setting.operator), setting.sizes(dim)
    gemms = operator.gemms(dict.fromkeys(operator.axes, _ANY_SIZE) | known)
    for names, gemm in zip(operator.products, gemms, strict=True):
        if names.split()[-2] in known:  # as ``linear`` and ``batched_gemm`` have them: ..., columns, rows
            yield gemm.axes["n"], gemm.axes["k"]


_any_backend = is_head_dim("", "flash", "efficient", "cudnn")

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "SDPA backend selection": _multiples(_any_backend, 8),
        "FlashAttention-2 template": _flash_check(_is_template, _template_detail),
        "FlashAttention-2 padding waste": _flash_check(_has_little_padding, _template_detail),
        # the source of FlashAttention-2 picks tiles of every template that fit every GPU from 8.0 on
        "shared-memory tile budget": _flash_check(lambda _, flash: flash.template is not None, _tile_detail),
        "scheme operator": Check(_has_needs, _has_operator, _operator_detail),
        "scheme kernel": Check(
            _has_kernel_limits,
            lambda dim, setting: unreadable(dim, setting) is None,
            lambda dim, setting: unreadable(dim, setting) or _columns_text(dim, setting),
        ),
        "scheme groups": Check(_has_groups, lambda dim, setting: not any(_ragged(dim, setting)), _groups_detail),
        "latent kernel": Check(is_latent, lambda dim, setting: _latent_problem(dim, setting) is None, _latent_detail),
        "cuBLAS alignment tier": _aligned_rows(is_cublas_row),
        "cuBLAS heuristic": _recorded(is_cublas, "only the recorded kernels tell which one is chosen"),
        "vectorised access": _aligned_rows(is_row),
        "Tensor Core tile": Check(is_tensor_core_row, _fits_mma, _mma_detail),
        "L2 sector": _aligned_rows(is_row, SECTOR),
        "CTA wave quantisation": _recorded(
            lambda setting: setting.operator != "copy",
            "the number of tiles follows from the kernel's tile, which only a record tells",
        ),
        "cp.async": _aligned_rows(is_row),
        "TMA alignment": _aligned_rows(is_tma_row),
        "WGMMA tile": _multiples(lambda setting: is_tma_row(setting) and "n" in setting.sides, 8),
        "FP8 packing": _multiples(lambda setting: setting.dtype == "fp8" and is_row(setting), 16),
        "shared-memory banks": _recorded(
            _any_backend, "the libraries swizzle their tiles, so kernels should have no conflicts"
        ),
    }
)
"""The check of each rule in ``rules.toml``, by its name."""
