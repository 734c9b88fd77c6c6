import json

import pytest

from gac.profiling.folders import find_profile
from gac.profiling.kernel_names import Kernel, describe


def fields(name: str) -> dict[str, object]:
    """What the name tells, without what it does not."""
    kernel = describe(name)
    return {key: value for key, value in vars(kernel).items() if key != "name" and value not in (None, False)}


def test_nvjet_names_give_tile_pipeline_cluster_and_split() -> None:
    name = "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_splitK_TNN"
    assert describe(name) == Kernel(
        name,
        family="nvjet",
        role="gemm",
        architecture=90,
        tier=8,
        tile=(128, 256),
        k_tile=64,
        stages=4,
        split_k=True,
        cluster=(1, 2),
        persistent=True,
    )


def test_an_older_nvjet_name_has_no_architecture() -> None:
    assert fields("nvjet_hsh_320x128_64x3_1x2_h_bz_coopB_TNT") == {
        "family": "nvjet",
        "role": "gemm",
        "tier": 8,
        "tile": (320, 128),
        "k_tile": 64,
        "stages": 3,
        "cluster": (1, 2),
        "persistent": True,
    }


def test_fp8_operands_have_to_be_aligned_to_16_elements() -> None:
    kernel = describe("nvjet_sm90_qqtst_128x128_128x6_1x2_h_bz_ovscale_bias_TNT")
    assert (kernel.tier, kernel.tile, kernel.k_tile) == (16, (128, 128), 128)


@pytest.mark.parametrize(
    ("name", "architecture", "tier", "tile", "k_tile", "stages"),
    [
        ("cutlass_80_tensorop_bf16_s16816gemm_bf16_64x128_64x6_tn_align2", 80, 2, (64, 128), 64, 6),
        ("cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x1_tn_align2", 80, 2, (32, 32), 128, 1),
        ("cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_tn_align1", 75, 1, (256, 128), None, None),
        ("cutlass_75_tensorop_s1688gemm_bf16_64x64_tn_align1", 75, 1, (64, 64), None, None),
        ("cutlass_80_tensorop_f16_s16816gemm_f16_128x64_32x6_tn_align8", 80, 8, (128, 64), 32, 6),
    ],
)
def test_cutlass_names_give_the_alignment(name, architecture, tier, tile, k_tile, stages) -> None:
    kernel = describe(f"cutlass::Kernel2<{name}>")
    assert (kernel.family, kernel.role, kernel.persistent) == ("cutlass", "gemm", False)
    assert (kernel.architecture, kernel.tier, kernel.tile) == (architecture, tier, tile)
    assert (kernel.k_tile, kernel.stages) == (k_tile, stages)
    assert kernel.label == name


@pytest.mark.parametrize(
    ("name", "family", "architecture", "tier", "tile", "stages"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", "cublas", 80, 8, (128, 256), 3),
        ("ampere_bf16_s16816gemm_bf16_64x64_sliced1x2_ldg8_relu_f2f_stages_64x5_tn", "cublas", 80, 8, (64, 64), 5),
        ("ampere_s16816gemm_bf16_128x128_nt", "cublas", 80, None, (128, 128), None),
        (
            "sm80_xmma_gemm_f16f16_f16f32_f32_nn_n_tilesize96x64x32_stage3_warpsize2x2x1_tensor16x8x16_kernel",
            "xmma",
            80,
            8,
            (96, 64),
            3,
        ),
        (
            "cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_bf16_bf16_128x128x64_2x1x1_0_tnn_align8_warpspecialized",
            "cutlass",
            90,
            8,
            (128, 128),
            None,
        ),
    ],
)
def test_other_gemm_libraries(name, family, architecture, tier, tile, stages) -> None:
    kernel = describe(name)
    assert (kernel.family, kernel.role) == (family, "gemm")
    assert (kernel.architecture, kernel.tier, kernel.tile, kernel.stages) == (architecture, tier, tile, stages)


def test_a_cutlass_type_written_out_gives_the_architecture_of_its_main_loop() -> None:
    name = (
        "cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<"
        "cute::tuple<int, int, int>, cutlass::gemm::collective::CollectiveMma<"
        "cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedFP8<4>>>>>"
    )
    assert fields(name) == {"family": "cutlass", "role": "gemm", "architecture": 90, "tier": 16}


def test_attention_names_give_the_head_dim_they_were_compiled_for() -> None:
    flash = describe("pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false>, true>")
    assert (flash.family, flash.role, flash.template_head_dim, flash.tile) == ("flash", "attention", 128, (128, 64))
    assert flash.label == "pytorch_flash::flash_fwd_kernel<128, 128, 64>"
    cudnn = describe("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0")
    assert (cudnn.family, cudnn.architecture, cudnn.template_head_dim) == ("cudnn attention", 90, 128)
    assert cudnn.tile == (64, 128)


@pytest.mark.parametrize(("architecture", "persistent"), [(80, False), (90, True)])
def test_cudnn_attention_is_persistent_on_hopper(architecture, persistent) -> None:
    kernel = describe(f"cudnn_generated_fort_native_sdpa_sm{architecture}_flash_fprop_f16_knob_7_64x128x128_4x1x1")
    assert kernel.persistent is persistent


def test_a_gemm_without_tensor_cores_names_its_alignment() -> None:
    name = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute"
    assert (describe(name).tier, describe(name).stages) == (4, 3)


@pytest.mark.parametrize(("aligned", "tier"), [("aligned", 8), ("notaligned", 1)])
def test_mem_efficient_attention_says_whether_it_is_aligned(aligned, tier) -> None:
    kernel = describe(f"fmha_cutlassF_bf16_{aligned}_64x128_rf_sm80")
    assert (kernel.family, kernel.role, kernel.tier, kernel.tile) == ("mem-efficient", "attention", tier, (64, 128))


@pytest.mark.parametrize(
    ("name", "family", "role"),
    [
        ("gemv2T_kernel_val<int, int, __nv_bfloat16, float, float>", "gemv", "gemv"),
        ("internal::gemvx::kernel<int, int, __nv_bfloat16, 7, cublasGemvParamsEx<int>>", "gemv", "gemv"),
        ("dot_kernel<float, 128, 0, cublasDotParams<float>>", "gemv", "gemv"),
        ("cublasLt::splitKreduce_kernel<32, 16, int, float>", "split-k reduce", "reduce"),
        ("reduce_1Block_kernel<float, 128, 7>", "reduce", "reduce"),
        ("at::native::tinygemm_m16n8k16_chunk_kernel<BLayout_TC_int4<8, 128>, 8, 8>", "tinygemm", "gemm"),
        ("at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "fill", "copy/pad"),
        ("at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>", "copy", "copy/pad"),
        ("at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise", "other"),
        ("softmax_warp_forward<c10::BFloat16, float, 10, false>", "softmax", "other"),
        ("some_kernel_nobody_knows", "other", "other"),
    ],
)
def test_what_only_has_a_family(name, family, role) -> None:
    assert fields(name).items() >= {"family": family, "role": role}.items()


def test_every_kernel_that_the_h100_recorded_is_known() -> None:
    lines = map(json.loads, find_profile("nvidia-h100-80gb-hbm3").read_text().splitlines())
    kernels = [describe(line["name"]) for line in lines if line["record"] == "kernel"]
    assert len(kernels) > 100
    assert [kernel.name for kernel in kernels if kernel.family == "other"] == []
    assert all(kernel.tile and kernel.tier for kernel in kernels if kernel.family in {"nvjet", "xmma"})


@pytest.mark.parametrize(
    ("kernel", "flags", "even"),
    [
        ("flash_fwd_kernel", "false, true, false, false, false, true, false, false", True),
        ("flash_fwd_kernel", "false, true, false, false, true, false, false, false", False),
        ("flash_fwd_splitkv_kernel", "false, false, false, false, true, false, true, false", True),
        ("flash_fwd_splitkv_kernel", "false, false, false, false, false, true, true, false", False),
    ],
)
def test_flash_says_whether_it_checks_bounds_of_the_head_dim(kernel, flags, even) -> None:
    traits = "Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, T, Flash_kernel_traits<128, 128, 64, 4, T> >"
    assert describe(f"pytorch_flash::{kernel}<{traits}, {flags}>").even_k is even
