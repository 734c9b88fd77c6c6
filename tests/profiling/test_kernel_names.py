import json

import pytest

from gac.profiling.folders import find_profile
from gac.profiling.kernel_names import describe

GEMM = {"role": "gemm"}
NVJET = GEMM | {"family": "nvjet", "tier": 8, "persistent": True}
CUTLASS = GEMM | {"family": "cutlass"}
CUBLAS = GEMM | {"family": "cublas", "architecture": 80}
XMMA = GEMM | {"family": "xmma", "architecture": 80, "stages": 3}
ATTENTION = {"role": "attention"}
CUDNN = ATTENTION | {"family": "cudnn attention", "tier": 8, "template_d": 128, "tile": (64, 128)}
EFFICIENT = ATTENTION | {"family": "mem-efficient", "architecture": 80, "tile": (64, 128)}

KNOWN = {
    "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_splitK_TNN": NVJET
    | {"architecture": 90, "tile": (128, 256), "k_tile": 64, "stages": 4, "split_k": True, "cluster": (1, 2)},
    "nvjet_sm90_qqtst_128x128_128x6_1x2_h_bz_ovscale_bias_TNT": NVJET
    | {"architecture": 90, "tier": 16, "tile": (128, 128), "k_tile": 128, "stages": 6, "cluster": (1, 2)},
    "cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_64x128_64x6_tn_align2>": CUTLASS
    | {"architecture": 80, "tier": 2, "tile": (64, 128), "k_tile": 64, "stages": 6},
    "cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_tn_align1>": CUTLASS
    | {"architecture": 75, "tier": 1, "tile": (256, 128)},
    "cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_bf16_bf16_128x128x64_2x1x1_0_tnn_align8_warp": CUTLASS
    | {"architecture": 90, "tier": 8, "tile": (128, 128), "k_tile": 64, "cluster": (2, 1), "persistent": True},
    "cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<"
    "cute::tuple<int, int, int>, cutlass::gemm::collective::CollectiveMma<"
    "cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedFP8<4>>>>>": CUTLASS | {"architecture": 90, "tier": 16},
    "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn": CUBLAS
    | {"tier": 8, "tile": (128, 256), "k_tile": 64, "stages": 3},
    "ampere_s16816gemm_bf16_128x128_nt": CUBLAS | {"tile": (128, 128)},
    "sm80_xmma_gemm_f16f16_f16f32_f32_nn_n_tilesize96x64x32_stage3_warpsize2x2x1_tensor16x8x16_kernel": XMMA
    | {"tier": 8, "tile": (96, 64), "k_tile": 32},
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute": XMMA
    | {"tier": 4, "tile": (64, 64), "k_tile": 8},
    "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false>, true>": ATTENTION
    | {"family": "flash", "architecture": 80, "tier": 8, "template_d": 128, "tile": (128, 64)},
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0": CUDNN
    | {"architecture": 90, "persistent": True},
    "fmha_cutlassF_bf16_notaligned_64x128_rf_sm80": EFFICIENT | {"tier": 1},
    "at::native::tinygemm_m16n8k16_chunk_kernel<BLayout_TC_int4<8, 128>, 8, 8>": GEMM
    | {"family": "tinygemm", "architecture": 80, "tile": (8, 16)},
}


FAMILIES = {
    "gemv2T_kernel_val<int, int, __nv_bfloat16, float, float>": ("gemv", "gemv"),
    "cublasLt::splitKreduce_kernel<32, 16, int, float>": ("split-k reduce", "reduce"),
    "at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": ("fill", "copy/pad"),
    "at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": ("elementwise", "other"),
    "softmax_warp_forward<c10::BFloat16, float, 10, false>": ("softmax", "other"),
    "some_kernel_nobody_knows": ("other", "other"),
}
KNOWN |= {name: {"family": family, "role": role} for name, (family, role) in FAMILIES.items()}


@pytest.mark.parametrize("name", KNOWN)
def test_fields_of_a_name(name: str) -> None:
    fields = {key: value for key, value in vars(describe(name)).items() if key != "name" and value not in (None, False)}
    assert fields == KNOWN[name]


def test_every_kernel_that_the_h100_recorded_is_known() -> None:
    lines = map(json.loads, find_profile("nvidia-h100-80gb-hbm3").read_text().splitlines())
    kernels = [describe(line["name"]) for line in lines if line["record"] == "kernel"]
    assert len(kernels) > 100
    assert [kernel.name for kernel in kernels if kernel.family == "other"] == []
    assert all(kernel.tile and kernel.tier for kernel in kernels if kernel.family in {"nvjet", "xmma"})


def test_flash_says_whether_it_checks_bounds_of_the_head_dim() -> None:
    traits = "Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, T, Flash_kernel_traits<128, 128, 64, 4, T> >"
    for kernel, flags, even in (
        ("flash_fwd_kernel", "false, true, false, false, false, true, false, false", True),
        ("flash_fwd_kernel", "false, true, false, false, true, false, false, false", False),
        ("flash_fwd_splitkv_kernel", "false, false, false, false, true, false, true, false", True),
    ):
        assert describe(f"pytorch_flash::{kernel}<{traits}, {flags}>").even_k is even
