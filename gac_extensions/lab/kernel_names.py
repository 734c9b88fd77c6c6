"""Properties of a recorded kernel from its name: family, architecture, alignment tier, tile, template.

The formats come from names recorded on an H100, and for Ampere from published traces. No library documents them;
a field that a name does not show stays None.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

Role = Literal["gemm", "gemv", "attention", "copy/pad", "reduce", "other"]


@dataclass(frozen=True)
class Kernel:
    """Properties that the name of a kernel shows; the others are None."""

    name: str
    family: str  # the library or kind, the second column of ``_FORMATS``; ``other`` where no format is known
    role: Role
    architecture: int | None = None  # compute capability it was written for, times ten (75, 80), not the one it ran on
    tier: int | None = None  # elements to which its operands must be aligned: 16, 8, 4, 2 or 1
    # Output elements of a CTA. GEMM: along the features (n), then along the rows (m), since BLAS libraries see a
    # row-major result transposed; attention: query rows, then key columns.
    tile: tuple[int, int] | None = None
    k_tile: int | None = None  # elements of k in a stage of the pipeline through shared memory
    stages: int | None = None  # of that pipeline
    split_k: bool = False  # k is divided over CTAs (a second kernel then adds them up)
    cluster: tuple[int, int] | None = None  # CTAs of a thread block cluster, (x, y)
    persistent: bool = False  # a CTA goes on to further tiles, so that the grid need not count the tiles
    template_d: int | None = None  # attention: the head_dim that the kernel was compiled for
    even_k: bool | None = None  # FlashAttention-2: compiled for just that head_dim, without bounds checks (is_even_K)

    @property
    def main(self) -> bool:
        return self.role in {"gemm", "gemv", "attention"}

    @property
    def label(self) -> str:
        inner = re.search(r"(?:Kernel2?|device_kernel)<(\w+)", self.name)
        text = inner[1] if inner else self.name.removeprefix("void ").partition("<")[0].partition("(")[0]
        if self.template_d is not None and self.tile is not None and self.family == "flash":
            return f"{text}<{self.template_d}, {self.tile[0]}, {self.tile[1]}>"
        return text


@lru_cache(maxsize=4096)
def describe(name: str) -> Kernel:
    for pattern, family, role, known in _FORMATS:
        if match := re.search(pattern, name):
            split = role in {"gemm", "attention"} and "splitk" in name.lower()
            return Kernel(name, family, role, **_fields(match) | {"split_k": split} | known)
    return Kernel(name, "other", "other")


def _fields(match: re.Match[str]) -> dict[str, Any]:
    groups = {field: text for field, text in match.groupdict().items() if text is not None}
    fields: dict[str, Any] = {field: int(text) for field, text in groups.items() if field != "even_k"}
    if "even_k" in groups:
        fields["even_k"] = groups["even_k"] == "true"
    pairs = {field: (fields.pop(field), fields.pop(f"{field}2")) for field in ("tile", "cluster") if field in fields}
    return fields | pairs


_GENERATIONS = {"volta": 70, "turing": 75, "ampere": 80, "hopper": 90}
_SM, _TILE, _K_TILE = r"(?P<architecture>\d+)", r"(?P<tile>\d+)x(?P<tile2>\d+)", r"(?P<k_tile>\d+)"
_STAGES, _CLUSTER = rf"{_K_TILE}x(?P<stages>\d+)", r"(?P<cluster>\d+)x(?P<cluster2>\d+)"
_ALIGNED = r"align(?P<tier>\d+)"
_NVJET = rf"_{_TILE}_{_STAGES}_{_CLUSTER}"
_CUBLAS = rf"_\w*?gemm\w*?_{_TILE}_(?:\w*?ldg(?P<tier>\d+))?(?:\w*?stages_{_STAGES})?"
_XMMA = rf"sm{_SM}_xmma_gemm\w*?tilesize{_TILE}x{_K_TILE}(?:_stage(?P<stages>\d+))?"
_TRAITS = r"<\s*Flash_fwd_kernel_traits<(?P<template_d>\d+), (?P<tile>\d+), (?P<tile2>\d+)"
_FPROP = rf"_flash_fprop(?:\w*?_{_TILE}x(?P<template_d>\d+))?"

_FORMATS: tuple[tuple[str, str, Role, dict[str, Any]], ...] = (  # tried in this order
    # nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_splitK_TNN: types, tile, k-tile x stages, cluster, order. It reads
    # operands by TMA, so rows are 16-byte aligned: 8 elements of two bytes, 16 of FP8 (q).
    (rf"nvjet_(?:sm{_SM}_)?q[a-z]*{_NVJET}", "nvjet", "gemm", {"tier": 16, "persistent": True}),
    (rf"nvjet_(?:sm{_SM}_)?[a-z]+{_NVJET}", "nvjet", "gemm", {"tier": 8, "persistent": True}),
    # cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x3_tn_align2; sm75 names give no k-tile and stages
    (rf"cutlass_(?P<architecture>\d\d)_\w*?gemm\w*?_{_TILE}(?:_{_STAGES})?_\w*?{_ALIGNED}", "cutlass", "gemm", {}),
    # cutlass3x_sm90_tensorop_s64x128x16gemm_..._128x128x64_2x1x1_0_tnn_align8_...: tile, k-tile, cluster
    (
        rf"cutlass3x_sm{_SM}_\w*?_{_TILE}x{_K_TILE}_{_CLUSTER}x\d+_\w*?{_ALIGNED}",
        "cutlass",
        "gemm",
        {"persistent": True},
    ),
    # device_kernel<...GemmUniversal<...MainloopSm90TmaGmma...>>: PyTorch's own, for FP8 with row scales
    (rf"^(?=.*Persistent).*GemmUniversal<.*?MainloopSm{_SM}Tma", "cutlass", "gemm", {"tier": 16, "persistent": True}),
    (rf"GemmUniversal<.*?MainloopSm{_SM}Tma", "cutlass", "gemm", {"tier": 16}),
    # ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn: ldg8 loads 8 elements at once
    *((name + _CUBLAS, "cublas", "gemm", {"architecture": number}) for name, number in _GENERATIONS.items()),
    # sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32_stage4_warpsize2x2x1_..., native to its GPU;
    # sm80_xmma_gemm_..._ffma_aligna4_alignc4_...: only those that do without Tensor Cores name their alignment
    (rf"{_XMMA}\w*?_aligna(?P<tier>\d+)", "xmma", "gemm", {}),
    (_XMMA, "xmma", "gemm", {"tier": 8}),
    # flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, ...>>: dim of a head, query rows, key columns, warps.
    # Behind the traits come is_dropout (not where keys are split), is_causal, is_local, has_alibi, is_even_MN, even_K.
    *(
        (
            rf"{name}{_TRAITS}(?:.*?> ?>(?:, (?:true|false)){{{flags}}}, (?P<even_k>true|false))?",
            "flash",
            "attention",
            {"architecture": 80, "tier": 8},
        )
        for name, flags in (("flash_fwd_kernel", 5), ("flash_fwd_splitkv_kernel", 4))
    ),
    # cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_...: query rows, key columns,
    # dim of a head; then the warpgroups. It needs that dim to be a multiple of 8. Those for Hopper launch a CTA an SM
    # whatever the shape (b=1 s=1024 and b=4 s=2048 alike on an H100), so they are persistent.
    (rf"sdpa_sm(?P<architecture>9\d|1\d\d){_FPROP}", "cudnn attention", "attention", {"tier": 8, "persistent": True}),
    (rf"sdpa_sm{_SM}{_FPROP}", "cudnn attention", "attention", {"tier": 8}),
    # fmha_cutlassF_bf16_aligned_64x128_rf_sm80: query rows x key columns, output in registers or in memory
    (rf"fmha_cutlassF_\w*?notaligned_{_TILE}_\w*?sm{_SM}", "mem-efficient", "attention", {"tier": 1}),
    (rf"fmha_cutlassF_\w*?aligned_{_TILE}_\w*?sm{_SM}", "mem-efficient", "attention", {"tier": 8}),
    # PyTorch's fused INT4 kernel: a warp makes 16 x 8 outputs with Ampere's m16n8k16
    (r"tinygemm_m16n8k16", "tinygemm", "gemm", {"architecture": 80, "tile": (8, 16)}),
    (r"splitKreduce_kernel|flash_fwd_splitkv_combine", "split-k reduce", "reduce", {}),
    (r"gemv2|gemvx|gemvNSP|gemv_|\bdot_kernel", "gemv", "gemv", {}),
    (r"(?i:softmax)", "softmax", "other", {}),
    (r"[Rr]educe_kernel|reduce_1Block_kernel|reduction_kernel", "reduce", "reduce", {}),
    (r"FillFunctor|Memset|memset", "fill", "copy/pad", {}),
    (r"constant_pad|[Pp]ad(?:ding)?_kernel", "pad", "copy/pad", {}),
    (r"copy_kernel|CatArrayBatchedCopy|Memcpy|memcpy", "copy", "copy/pad", {}),
    (r"triu_tril_kernel", "mask", "other", {}),
    (r"elementwise_kernel", "elementwise", "other", {}),
)
