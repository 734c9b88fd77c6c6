from dataclasses import replace

import numpy as np
import pytest

from gac.core.operations import Operation, linear
from gac.forms.low_rank.spec import low_rank
from gac.lab.mechanisms.causes import cause_of, causes_of, edge_causes
from gac.profiling.cliffs import find_cliffs
from gac.profiling.records import Launch
from gac.profiling.table import Profile, Sweep

NVJET = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNN"
SMALL = "nvjet_sm90_tst_64x64_64x13_1x4_h_bz_TNT"
ALIGN2 = "cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x3_tn_align2>"
ALIGN1 = "cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>"
REDUCE = "cublasLt::splitKreduce_kernel<32, 16, int, float>"
FLASH = "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<{}, 128, {}, 4, false>>"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0"
COPY = "at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>"
FILL = "at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<c10::BFloat16>>"
GEMV = "internal::gemvx::kernel<int, int, __nv_bfloat16, 7>"


def ran(*names: str, grid: tuple[int, int, int] = (132, 1, 1), shared: int = 0) -> tuple[Launch, ...]:
    return tuple(Launch(name, grid, (128, 1, 1), shared) for name in names)


LARGER = ALIGN2.replace("128x64_64x3", "128x128_64x3")
EVEN, CHECKED = (
    f"pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<192, 128, 64, 8, false, Flash_kernel_traits<1> >"
    f"{', false' * 5}, {even}, false, false>"
    for even in ("true", "false")
)
SDPA = [Operation("sdpa", (("b", 4), ("h", 32), ("kv", 32), ("s", 2048), ("t", 2048), ("d", d))) for d in (120, 128)]

UNKNOWN = (Operation("copy", (("n", 8),)),) * 2
"""Operations whose GEMMs are not known."""

CAUSES = {
    "a lower alignment tier": (
        ran(ALIGN2),
        ran(NVJET),
        (),
        "alignment tier: the GEMM ran cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x3_tn_align2 (sm80, operands "
        f"aligned to 2 elements) instead of {NVJET} (sm90, operands aligned to 8 elements)",
    ),
    "of a pair, the GEMM that fell": (
        ran(NVJET, REDUCE, ALIGN1),
        ran(NVJET, REDUCE, NVJET),
        (),
        "alignment tier: the second GEMM ran cutlass_75_tensorop",
    ),
    "a tier is stronger than a switch before it": (ran(SMALL, ALIGN2), ran(NVJET, NVJET), (), "alignment tier: "),
    "another backend, even with copies before it": (
        ran(FILL, COPY, FLASH.format(128, 64)),
        ran(CUDNN),
        (),
        "template: flash served attention (pytorch_flash::flash_fwd_kernel<128, 128, 64>) instead of cudnn attention "
        f"served attention ({CUDNN})",
    ),
    "another template of the same backend": (
        ran(FLASH.format(192, 64)),
        ran(FLASH.format(128, 64)),
        (),
        "template: attention ran the flash kernel compiled for head_dim 192 instead of 128",
    ),
    "copies that the rescue does without": (
        ran(COPY, COPY, FLASH.format(128, 64)),
        ran(FLASH.format(128, 64)),
        (),
        "extra kernels: 3 kernels ran instead of 1; more than at the rescue: copy: at::native::elementwise_kernel",
    ),
    "more GEMMs than the rescue": (ran(NVJET, NVJET, NVJET), ran(NVJET), (), "extra kernels: "),
    "another kernel of the same tier": (
        ran(SMALL),
        ran(NVJET),
        (),
        f"kernel switch: the GEMM ran {SMALL} on 132 CTAs instead of {NVJET} on 132 CTAs",
    ),
    "a GEMV instead of a GEMM": (ran(GEMV), ran(NVJET), (), "kernel switch: "),
    "a split-k reduction less": (
        ran(ALIGN2),
        ran(ALIGN2, REDUCE),
        (),
        "kernel switch: the GEMM ran cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x3_tn_align2 without a split-k "
        "reduction, the rescue with one",
    ),
    "another grid for the same tiles": (
        ran(ALIGN2, grid=(64, 16, 1)),
        ran(ALIGN2, grid=(32, 16, 3)),
        (linear(1024, 1000, 4096), linear(1024, 1024, 4096)),
        "kernel switch: the GEMM ran cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x3_tn_align2 on a grid of "
        "64x16x1 CTAs of 128x1x1 threads instead of a grid of 32x16x3 CTAs of 128x1x1 threads",
    ),
    "template arguments only": (
        ran(GEMV),
        ran(GEMV.replace("7", "6")),
        (),
        "kernel switch: the GEMM ran internal::gemvx::kernel on 132 CTAs (with other template arguments)",
    ),
    "bounds checks on the head_dim": (
        ran(CHECKED),
        ran(EVEN),
        (),
        "kernel switch: attention ran pytorch_flash::flash_fwd_kernel<192, 128, 64> (is_even_K false) on 132 CTAs "
        "instead of pytorch_flash::flash_fwd_kernel<192, 128, 64> (is_even_K true) on 132 CTAs",
    ),
    "rows that lie across cache lines": (
        ran(SMALL),
        ran(SMALL),
        (linear(1024, 1368, 576), linear(1024, 1408, 576)),
        "row alignment: the same kernels ran on rows of 2736 bytes, multiples of 16 instead of 128: 128 bytes of a row "
        "lie on 1.88 cache lines on average instead of 1.00",
    ),
    "operations whose GEMMs are not known": (ran(CUDNN), ran(CUDNN), SDPA, "row alignment: "),
    "the tiles, where results alone are aligned otherwise": (
        ran(SMALL),
        ran(SMALL),
        (linear(1024, 4096, 608), linear(1024, 4096, 640)),
        f"tile padding: the GEMM ran {SMALL}; 5.0% of its 64x64 tiles is padding instead of 0.0%",
    ),
    "the GEMMs of a pair by their shapes": (
        ran(SMALL, SMALL),
        ran(SMALL, SMALL),
        (low_rank(4096, 576, 328, 576), low_rank(4096, 576, 344, 576)),
        "tile padding: the first GEMM ran",
    ),
    "nothing recorded": ((), ran(NVJET), (), None),
    "nothing recorded at the rescue": (ran(NVJET), (), (), None),
    "the same kernel": (ran(NVJET), ran(NVJET), (), None),
    "the same kernel on the same tiles": (
        ran(NVJET),
        ran(NVJET),
        (linear(1024, 1024, 1024), linear(1024, 1088, 1024)),
        None,
    ),
    "the same kernel in other waves": (
        ran(ALIGN2, grid=(140, 1, 1), shared=180_000),
        ran(ALIGN2, grid=(264, 1, 1), shared=180_000),
        (),
        None,
    ),
    "a single row of results": (ran(GEMV), ran(GEMV), (linear(1, 576, 642), linear(1, 576, 704)), None),
}


@pytest.mark.parametrize(("slow", "fast", "operations", "expected"), CAUSES.values(), ids=CAUSES)
def test_the_strongest_cause_that_the_record_shows(slow, fast, operations, expected, header) -> None:
    found = cause_of(slow, fast, header, *(operations or UNKNOWN))
    assert (found is None) == (expected is None)
    if found is not None:
        assert f"{found.kind}: {found.evidence}".startswith(expected)
        assert found.slow in {launch.name for launch in slow}
        assert found.fast in {"", *(launch.name for launch in fast)}


@pytest.mark.parametrize(
    ("slow", "fast", "shared", "expected"),
    [
        (265, 132, 180_000, "on 132 CTAs: 3 waves instead of 1"),
        (140, 264, 180_000, "on 264 CTAs: the last of its 2 waves is 6% full"),
        (1000, 132, 0, "on 132 CTAs"),  # waves that are only bounded
    ],
)
def test_a_switch_says_what_it_does_to_the_waves(slow, fast, shared, expected, header) -> None:
    before, after = ran(ALIGN2, grid=(slow, 1, 1), shared=shared), ran(LARGER, grid=(fast, 1, 1), shared=shared)
    found = cause_of(before, after, header, *UNKNOWN)
    assert found.kind == "kernel switch"
    assert found.evidence.endswith(expected)


def test_math_attention_has_rows_of_float32(header) -> None:
    xmma = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute"
    dims = np.arange(96, 129, 8)
    ns = np.where(dims == 104, 40.0, 30.0)
    fixed = (("b", 1), ("h", 8), ("kv", 8), ("s", 1024), ("t", 1024))
    sweep = Sweep("sdpa_math", "bf16", "cold", "d", fixed, dims, ns, 0.001 * ns, (ran(xmma, xmma),) * 5)
    (found,) = causes_of(sweep, find_cliffs(sweep), header)
    assert found.evidence.startswith("the same kernels ran on rows of 416 bytes, multiples of 32 instead of 64")


def test_every_collapsed_dim_of_a_sweep_has_its_cause(header) -> None:
    dims = np.arange(1016, 1033)
    kernel = {dim: NVJET if dim % 8 == 0 else ALIGN2 if dim % 2 == 0 else ALIGN1 for dim in dims.tolist()}
    ns = np.array([{NVJET: 32.0, ALIGN2: 82.0, ALIGN1: 168.0}[kernel[dim]] for dim in dims.tolist()])
    fixed = (("m", 1024), ("k", 4096), ("n", 4096))
    launches = tuple(ran(kernel[dim], kernel[dim]) for dim in dims.tolist())
    sweep = Sweep("low_rank", "bf16", "cold", "r", fixed, dims, ns, 0.001 * ns, launches)
    causes = causes_of(sweep, find_cliffs(sweep), header)
    assert [cause.kind for cause in causes] == ["alignment tier"] * 14
    assert causes[0].slow == ALIGN1
    blind = replace(sweep, launches=((),) * len(dims))
    assert causes_of(blind, find_cliffs(blind), header) == (None,) * 14


# --- the edges of staircases

BIG = "cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_64x3_tn_align8>"


@pytest.mark.parametrize(
    ("after", "shared", "kind", "evidence"),
    [
        (BIG, 180_000, "wave", "in 2 waves of 132 instead of 1 (136 tiles instead of 132)"),
        (BIG.replace("256x128", "128x128"), 180_000, "kernel switch", ""),
        (BIG, 50_000, None, ""),  # waves that an SM may hold at once
    ],
)
def test_the_cause_of_a_staircase_that_jumps_from_33_to_34_tiles(after, shared, kind, evidence, header) -> None:
    dims = np.arange(4096, 4609, 128)
    ns = np.where(dims > 4224, 60.0, 30.0)
    names = [after if dim > 4224 else BIG for dim in dims.tolist()]
    launches = tuple(
        (Launch(name, (4, m // 128, 1), (256, 1, 1), shared),) for name, m in zip(names, dims.tolist(), strict=True)
    )
    sweep = Sweep("linear", "bf16", "cold", "m", (("k", 4096), ("n", 1024)), dims, ns, 0.001 * ns, launches)
    assert find_cliffs(sweep).sweet_spots.tolist() == [4224]
    (found,) = edge_causes(sweep, find_cliffs(sweep), header)
    assert (found and (found.kind, found.slow, found.fast)) == (kind and (kind, after, BIG))
    assert found is None or found.evidence.endswith(evidence)
    assert edge_causes(replace(sweep, launches=((),) * len(dims)), find_cliffs(sweep), header) == (None,)


def test_most_edges_that_an_h100_recorded_have_a_cause() -> None:
    profile = Profile.load("nvidia-h100-80gb-hbm3")
    found = [one for sweep in profile.sweeps() for one in edge_causes(sweep, find_cliffs(sweep), profile.header)]
    kinds = {one.kind for one in found if one is not None}
    assert {"kernel switch", "template", "wave"} <= kinds
    assert sum(one is not None for one in found) > 0.8 * len(found)
