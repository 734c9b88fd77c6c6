"""What a recorded kernel name says: family, architecture, alignment tier, tile, template.

The formats were read from the names that an H100 records, and for what Ampere records from published traces. No
library documents them; a field that a name does not show stays None.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Role = Literal["gemm", "gemv", "attention", "copy/pad", "reduce", "other"]


@dataclass(frozen=True)
class Kernel:
    """What can be read from the name of a kernel; None is what its name does not tell.

    Attributes:
        name: as recorded.
        family: ``nvjet``, ``cutlass``, ``xmma``, ``cublas``, ``gemv``, ``flash``, ``cudnn attention``,
            ``mem-efficient``, ``tinygemm``, ``split-k reduce``, ``reduce``, ``elementwise``, ``copy``, ``pad``,
            ``fill``, ``softmax`` or ``other``.
        role: what it does in an operator.
        architecture: the compute capability it was written for, times ten (75, 80, 90), not the one it ran on.
        tier: elements to which its operands must be aligned: 16, 8, 4, 2 or 1.
        tile: output elements of a CTA. GEMM: along the features (n), then along the rows (m), since BLAS libraries
            see a row-major result transposed; attention: query rows, then key columns.
        k_tile: GEMM: elements of k that one pipeline stage holds.
        stages: stages of the pipeline through shared memory.
        split_k: whether k is shared out between CTAs (a second kernel then adds them up).
        cluster: CTAs of a thread block cluster, (x, y).
        persistent: whether a CTA goes on to further tiles, so that the grid need not count the tiles.
        template_head_dim: attention: the head_dim that the kernel was compiled for.
        even_k: FlashAttention-2: whether it was compiled for exactly that head_dim, without bounds checks (is_even_K).
    """

    name: str
    family: str
    role: Role
    architecture: int | None = None
    tier: int | None = None
    tile: tuple[int, int] | None = None
    k_tile: int | None = None
    stages: int | None = None
    split_k: bool = False
    cluster: tuple[int, int] | None = None
    persistent: bool = False
    template_head_dim: int | None = None
    even_k: bool | None = None

    @property
    def main(self) -> bool:
        """Whether it does the operator's arithmetic (the others prepare or finish)."""
        return self.role in {"gemm", "gemv", "attention"}

    @property
    def label(self) -> str:
        """A name short enough for a sentence."""
        inner = re.search(r"(?:Kernel2?|device_kernel)<(\w+)", self.name)
        text = inner[1] if inner else self.name.removeprefix("void ").partition("<")[0].partition("(")[0]
        if self.template_head_dim is not None and self.tile is not None and self.family == "flash":
            return f"{text}<{self.template_head_dim}, {self.tile[0]}, {self.tile[1]}>"
        return text


def describe(name: str) -> Kernel:
    """What a recorded name says about its kernel; family and role ``other`` where it says nothing."""
    return _describe(name)


@lru_cache(maxsize=4096)
def _describe(name: str) -> Kernel:
    for pattern, read in _READERS:
        found = pattern.search(name)
        if found:
            return read(name, found)
    return Kernel(name, "other", "other")


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _nvjet(name: str, found: re.Match[str]) -> Kernel:
    """``nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_splitK_TNN``: types, tile, k-tile x stages, cluster, order.

    Reads its operands by TMA, so their rows have to be 16-byte aligned: 8 elements of two bytes, 16 of FP8 (``q``).
    """
    architecture, types, *sizes = found.groups()
    first, second, k_tile, stages, width, height = map(int, sizes)
    return Kernel(
        name,
        "nvjet",
        "gemm",
        _number(architecture),
        tier=16 if types.startswith("q") else 8,
        tile=(first, second),
        k_tile=k_tile,
        stages=stages,
        split_k="_splitK" in name,
        cluster=(width, height),
        persistent=True,
    )


def _cutlass(name: str, found: re.Match[str]) -> Kernel:
    """``cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x3_tn_align2``; sm75 names give no k-tile and stages."""
    architecture, first, second, k_tile, stages, tier = found.groups()
    return Kernel(
        name,
        "cutlass",
        "gemm",
        int(architecture),
        tier=_number(tier),
        tile=(int(first), int(second)),
        k_tile=_number(k_tile),
        stages=_number(stages),
        split_k="splitk" in name.lower(),
    )


def _cublas(name: str, found: re.Match[str]) -> Kernel:
    """``ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn``: ldg8 loads 8 elements at once."""
    generation, first, second, load, k_tile, stages = found.groups()
    architecture = {"volta": 70, "turing": 75, "ampere": 80, "hopper": 90}[generation]
    return Kernel(
        name,
        "cublas",
        "gemm",
        architecture,
        tier=_number(load),
        tile=(int(first), int(second)),
        k_tile=_number(k_tile),
        stages=_number(stages),
        split_k="splitk" in name.lower(),
    )


def _xmma(name: str, found: re.Match[str]) -> Kernel:
    """``sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32_stage4_warpsize2x2x1_...``, native to its GPU.

    Those that do without Tensor Cores (``..._ffma_aligna4_alignc4_...``) name their alignment.
    """
    architecture, first, second, k_tile, stages, tier = found.groups()
    return Kernel(
        name,
        "xmma",
        "gemm",
        int(architecture),
        tier=8 if tier is None else int(tier),
        tile=(int(first), int(second)),
        k_tile=int(k_tile),
        stages=_number(stages),
        split_k="splitk" in name.lower(),
    )


def _cutlass3(name: str, found: re.Match[str]) -> Kernel:
    """``cutlass3x_sm90_tensorop_s64x128x16gemm_..._128x128x64_2x1x1_0_tnn_align8_...``: tile, k-tile, cluster."""
    architecture, first, second, k_tile, width, height, tier = map(int, found.groups())
    return Kernel(
        name,
        "cutlass",
        "gemm",
        architecture,
        tier=tier,
        tile=(first, second),
        k_tile=k_tile,
        cluster=(width, height),
        persistent=True,
    )


def _cutlass_type(name: str, found: re.Match[str]) -> Kernel:
    """``device_kernel<...GemmUniversal<...MainloopSm90TmaGmma...>>``: PyTorch's own, for FP8 with row scales."""
    return Kernel(name, "cutlass", "gemm", int(found[1]), tier=16, persistent="Persistent" in name)


def _flash(name: str, found: re.Match[str]) -> Kernel:
    """``flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, ...>>``: head_dim, query rows, key columns, warps.

    Then ``is_dropout`` (not where keys are split), ``is_causal``, ``is_local``, ``has_alibi``, ``is_even_MN``,
    ``is_even_K``, ...
    """
    head_dim, rows, columns = map(int, found.groups())
    flags = re.search(r"> ?>((?:, (?:true|false))+)>", name)
    split = "splitkv" in name
    return Kernel(
        name,
        "flash",
        "attention",
        80,
        tier=8,
        tile=(rows, columns),
        split_k=split,
        template_head_dim=head_dim,
        even_k=flags[1].removeprefix(", ").split(", ")[4 if split else 5] == "true" if flags else None,
    )


def _cudnn(name: str, found: re.Match[str]) -> Kernel:
    """``cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_...``.

    Query rows, key columns, head_dim; then the warpgroups. Needs head_dim to be a multiple of 8. Those for Hopper
    launch a CTA an SM whatever the shape (b=1 s=1024 and b=4 s=2048 alike on an H100), so they are persistent.
    """
    architecture, rows, columns, head_dim = found.groups()
    tile = None if rows is None else (int(rows), int(columns))
    return Kernel(
        name,
        "cudnn attention",
        "attention",
        int(architecture),
        tier=8,
        tile=tile,
        persistent=int(architecture) >= 90,
        template_head_dim=_number(head_dim),
    )


def _efficient(name: str, found: re.Match[str]) -> Kernel:
    """``fmha_cutlassF_bf16_aligned_64x128_rf_sm80``: query rows x key columns, output in registers or in memory."""
    aligned, rows, columns, architecture = found.groups()
    tier = 8 if aligned == "aligned" else 1
    return Kernel(name, "mem-efficient", "attention", int(architecture), tier=tier, tile=(int(rows), int(columns)))


def _plain(family: str, role: Role) -> Callable[[str, re.Match[str]], Kernel]:
    def read(name: str, _found: re.Match[str]) -> Kernel:
        return Kernel(name, family, role)

    return read


def _tinygemm(name: str, _found: re.Match[str]) -> Kernel:
    """PyTorch's fused INT4 kernel: a warp makes 16 x 8 outputs with Ampere's m16n8k16."""
    return Kernel(name, "tinygemm", "gemm", 80, tile=(8, 16))


_READERS: tuple[tuple[re.Pattern[str], Callable[[str, re.Match[str]], Kernel]], ...] = (
    (re.compile(r"nvjet_(?:sm(\d+)_)?([a-z]+)_(\d+)x(\d+)_(\d+)x(\d+)_(\d+)x(\d+)"), _nvjet),
    (re.compile(r"cutlass_(\d\d+)_\w*?gemm\w*?_(\d+)x(\d+)(?:_(\d+)x(\d+))?_\w*?align(\d+)"), _cutlass),
    (re.compile(r"cutlass3x_sm(\d+)_\w*?_(\d+)x(\d+)x(\d+)_(\d+)x(\d+)x\d+_\w*?align(\d+)"), _cutlass3),
    (re.compile(r"GemmUniversal<.*?MainloopSm(\d+)Tma"), _cutlass_type),
    (
        re.compile(
            r"(volta|turing|ampere|hopper)_\w*?gemm\w*?_(\d+)x(\d+)_(?:\w*?ldg(\d+))?(?:\w*?stages_(\d+)x(\d+))?"
        ),
        _cublas,
    ),
    (re.compile(r"sm(\d+)_xmma_gemm\w*?tilesize(\d+)x(\d+)x(\d+)(?:_stage(\d+))?(?:\w*?_aligna(\d+))?"), _xmma),
    (re.compile(r"flash_fwd_(?:splitkv_)?kernel<\s*Flash_fwd_kernel_traits<(\d+), (\d+), (\d+)"), _flash),
    (re.compile(r"sdpa_sm(\d+)_flash_fprop(?:\w*?_(\d+)x(\d+)x(\d+))?"), _cudnn),
    (re.compile(r"fmha_cutlassF_\w*?_?(aligned|notaligned)_(\d+)x(\d+)_\w*?sm(\d+)"), _efficient),
    (re.compile(r"tinygemm_m16n8k16"), _tinygemm),
    (re.compile(r"splitKreduce_kernel|flash_fwd_splitkv_combine"), _plain("split-k reduce", "reduce")),
    (re.compile(r"gemv2|gemvx|gemvNSP|gemv_|\bdot_kernel"), _plain("gemv", "gemv")),
    (re.compile(r"softmax", re.IGNORECASE), _plain("softmax", "other")),
    (re.compile(r"[Rr]educe_kernel|reduce_1Block_kernel|reduction_kernel"), _plain("reduce", "reduce")),
    (re.compile(r"FillFunctor|Memset|memset"), _plain("fill", "copy/pad")),
    (re.compile(r"constant_pad|[Pp]ad(?:ding)?_kernel"), _plain("pad", "copy/pad")),
    (re.compile(r"copy_kernel|CatArrayBatchedCopy|Memcpy|memcpy"), _plain("copy", "copy/pad")),
    (re.compile(r"triu_tril_kernel"), _plain("mask", "other")),
    (re.compile(r"elementwise_kernel"), _plain("elementwise", "other")),
)
"""Tried in this order: the first pattern that is found reads the name."""
