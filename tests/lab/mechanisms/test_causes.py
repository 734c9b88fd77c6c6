from dataclasses import replace

import numpy as np
import pytest

from gac.lab.mechanisms.causes import Cause, cause_of, causes_of
from gac.operations import Operation, linear, low_rank
from gac.profiling.cliffs import find_cliffs
from gac.profiling.records import Launch
from gac.profiling.table import Sweep

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


@pytest.fixture
def cause(header):
    def find(slow, fast, *operations, **changed) -> Cause | None:
        return cause_of(slow, fast, header, *operations, **changed)

    return find


def test_a_lower_alignment_tier(cause) -> None:
    assert cause(ran(ALIGN2), ran(NVJET)) == Cause(
        "alignment tier",
        "the GEMM ran cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x3_tn_align2 (sm80, operands aligned to 2 "
        f"elements) instead of {NVJET} (sm90, operands aligned to 8 elements)",
        ALIGN2,
        NVJET,
    )


def test_of_a_pair_the_gemm_that_fell_is_named(cause) -> None:
    found = cause(ran(NVJET, REDUCE, ALIGN1), ran(NVJET, REDUCE, NVJET))
    assert (found.kind, found.slow, found.fast) == ("alignment tier", ALIGN1, NVJET)
    assert found.evidence.startswith("the second GEMM ran cutlass_75_tensorop")


def test_an_alignment_tier_is_stronger_than_a_kernel_switch_before_it(cause) -> None:
    assert cause(ran(SMALL, ALIGN2), ran(NVJET, NVJET)).kind == "alignment tier"


def test_another_backend_is_a_template_even_with_copies_before_it(cause) -> None:
    found = cause(ran(FILL, COPY, FLASH.format(128, 64)), ran(CUDNN))
    assert found.kind == "template"
    assert found.evidence == (
        f"flash served attention (pytorch_flash::flash_fwd_kernel<128, 128, 64>) instead of cudnn attention served "
        f"attention ({CUDNN})"
    )


def test_another_template_of_the_same_backend(cause) -> None:
    found = cause(ran(FLASH.format(192, 64)), ran(FLASH.format(128, 64)))
    assert found.kind == "template"
    assert found.evidence == "attention ran the flash kernel compiled for head_dim 192 instead of 128"


def test_copies_that_the_rescue_does_without(cause) -> None:
    found = cause(ran(COPY, COPY, FLASH.format(128, 64)), ran(FLASH.format(128, 64)))
    assert (found.kind, found.slow, found.fast) == ("extra kernels", COPY, "")
    assert found.evidence == (
        "3 kernels ran instead of 1; more than at the rescue: copy: at::native::elementwise_kernel"
    )


def test_another_kernel_of_the_same_tier(cause) -> None:
    found = cause(ran(SMALL), ran(NVJET))
    assert found.kind == "kernel switch"
    assert found.evidence == f"the GEMM ran {SMALL} on 132 CTAs instead of {NVJET} on 132 CTAs"


def test_a_gemv_instead_of_a_gemm_is_a_kernel_switch(cause) -> None:
    assert cause(ran(GEMV), ran(NVJET)).kind == "kernel switch"


def test_a_split_k_reduction_more_or_less_is_a_kernel_switch(cause) -> None:
    found = cause(ran(ALIGN2), ran(ALIGN2, REDUCE))
    assert found.kind == "kernel switch"
    assert found.evidence.endswith("without a split-k reduction, the rescue with one")


def test_the_same_kernel_on_another_grid_for_the_same_tiles_is_a_kernel_switch(cause) -> None:
    operations = linear(1024, 1000, 4096), linear(1024, 1024, 4096)
    found = cause(ran(ALIGN2, grid=(64, 16, 1)), ran(ALIGN2, grid=(32, 16, 3)), *operations)
    assert found.kind == "kernel switch"
    assert found.evidence.endswith(
        "a grid of 64x16x1 CTAs of 128x1x1 threads instead of a grid of 32x16x3 CTAs of 128x1x1 threads"
    )


def test_a_switch_to_a_kernel_with_more_waves_says_so(cause) -> None:
    other = ALIGN2.replace("128x64_64x3", "128x128_64x3")
    found = cause(ran(ALIGN2, grid=(265, 1, 1), shared=180_000), ran(other, grid=(132, 1, 1), shared=180_000))
    assert found.kind == "kernel switch"
    assert found.evidence.endswith("on 132 CTAs: 3 waves instead of 1")


def test_a_switch_to_a_kernel_whose_last_wave_is_nearly_empty_says_so(cause) -> None:
    other = ALIGN2.replace("128x64_64x3", "128x128_64x3")
    found = cause(ran(ALIGN2, grid=(140, 1, 1), shared=180_000), ran(other, grid=(264, 1, 1), shared=180_000))
    assert found.evidence.endswith("on 264 CTAs: the last of its 2 waves is 6% full")


def test_waves_that_are_only_bounded_are_no_evidence(cause) -> None:
    other = ALIGN2.replace("128x64_64x3", "128x128_64x3")
    assert cause(ran(ALIGN2, grid=(1000, 1, 1)), ran(other)).evidence.endswith("on 132 CTAs")


def test_the_same_kernel_in_other_waves_explains_no_collapse(cause) -> None:
    assert cause(ran(ALIGN2, grid=(140, 1, 1), shared=180_000), ran(ALIGN2, grid=(264, 1, 1), shared=180_000)) is None


def test_bounds_checks_on_the_head_dim_are_a_kernel_switch(cause) -> None:
    flags = (
        "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<192, 128, 64, 8, false, Flash_kernel_traits<1> >{}>"
    )
    checked, even = (flags.format(f"{', false' * 5}, {even}, false, false") for even in ("false", "true"))
    found = cause(ran(checked), ran(even))
    assert found.kind == "kernel switch"
    label = "pytorch_flash::flash_fwd_kernel<192, 128, 64>"
    assert found.evidence == (
        f"attention ran {label} (is_even_K false) on 132 CTAs instead of {label} (is_even_K true) on 132 CTAs"
    )


def test_kernels_that_differ_in_template_arguments_only_say_so(cause) -> None:
    found = cause(ran(GEMV), ran(GEMV.replace("7", "6")))
    assert found.evidence.startswith("the GEMM ran internal::gemvx::kernel on 132 CTAs (with other template arguments)")


def test_math_attention_has_rows_of_float32(header) -> None:
    xmma = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute"
    dims = np.arange(96, 129, 8)
    ns = np.where(dims == 104, 40.0, 30.0)
    fixed = (("b", 1), ("h", 8), ("kv", 8), ("s", 1024), ("t", 1024))
    sweep = Sweep("sdpa_math", "bf16", "cold", "d", fixed, dims, ns, 0.001 * ns, (ran(xmma, xmma),) * 5)
    (found,) = causes_of(sweep, find_cliffs(sweep), header)
    assert found.evidence.startswith("the same kernels ran on rows of 416 bytes, multiples of 32 instead of 64")


def test_rows_that_lie_across_cache_lines(cause) -> None:
    found = cause(ran(SMALL), ran(SMALL), linear(1024, 1368, 576), linear(1024, 1408, 576))
    assert found == Cause(
        "row alignment",
        "the same kernels ran on rows of 2736 bytes, multiples of 16 instead of 128: 128 bytes of a row lie on 1.88 "
        "cache lines on average instead of 1.00",
        SMALL,
        SMALL,
    )


def test_the_alignment_of_a_single_row_of_results_explains_nothing(cause) -> None:
    assert cause(ran(GEMV), ran(GEMV), linear(1, 576, 642), linear(1, 576, 704)) is None


def test_the_alignment_of_results_explains_nothing_where_the_tiles_do(cause) -> None:
    found = cause(ran(SMALL), ran(SMALL), linear(1024, 4096, 608), linear(1024, 4096, 640))
    assert found.evidence == f"the GEMM ran {SMALL}; 5.0% of its 64x64 tiles is padding instead of 0.0%"


def test_less_of_the_tiles_used(cause) -> None:
    found = cause(ran(SMALL), ran(SMALL), linear(4096, 576, 328), linear(4096, 576, 344))
    assert found.kind == "tile padding"
    assert found.evidence == f"the GEMM ran {SMALL}; 14.6% of its 64x64 tiles is padding instead of 10.4%"


def test_nothing_is_made_up_where_the_record_does_not_tell(cause) -> None:
    assert cause((), ran(NVJET)) is None
    assert cause(ran(NVJET), ()) is None
    assert cause(ran(NVJET), ran(NVJET)) is None
    assert cause(ran(NVJET), ran(NVJET), linear(1024, 1024, 1024), linear(1024, 1088, 1024)) is None


def test_more_gemms_than_the_rescue_are_extra_kernels(cause) -> None:
    assert cause(ran(NVJET, NVJET, NVJET), ran(NVJET)).kind == "extra kernels"


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


def test_the_gemms_of_a_pair_are_told_apart_by_their_shapes(cause) -> None:
    found = cause(ran(SMALL, SMALL), ran(SMALL, SMALL), low_rank(4096, 576, 328, 576), low_rank(4096, 576, 344, 576))
    assert found.evidence.startswith("the first GEMM ran")


def test_operations_of_another_kind_have_no_known_gemms(cause) -> None:
    at = [Operation("sdpa", (("b", 4), ("h", 32), ("kv", 32), ("s", 2048), ("t", 2048), ("d", d))) for d in (120, 128)]
    assert cause(ran(CUDNN), ran(CUDNN), *at).kind == "row alignment"
