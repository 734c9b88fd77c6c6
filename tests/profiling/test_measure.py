from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gac.profiling import device
from gac.profiling.measure import names_by_mark, short_name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT"),
        (
            "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>(cutlass_75::Params)",
            "cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>",
        ),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, 7, false>(cublasGemvParams<int>)",
            "internal::gemvx::kernel<int, 7, false>",
        ),
        ("void (anonymous namespace)::fill<4>(int)", "(anonymous namespace)::fill<4>"),
        ("gemv2T_kernel_val<int, (bool)1>", "gemv2T_kernel_val<int, (bool)1>"),
    ],
)
def test_a_kernels_name_is_kept_without_its_arguments(name, short) -> None:
    assert short_name(name) == short


def event(device: str, name: str, start: float, end: float) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, device_type=SimpleNamespace(name=device), time_range=SimpleNamespace(start=start, end=end)
    )


def test_kernels_belong_to_the_mark_during_which_they_began() -> None:
    trace = [
        event("CPU", "gac:0", 0, 100),
        event("CPU", "aten::mm", 5, 20),
        event("CUDA", "gac:0", 30, 90),
        event("CUDA", "reduce(int)", 60, 90),
        event("CUDA", "gemm(int)", 30, 60),
        event("CUDA", "Memset (Device)", 25, 26),
        event("CPU", "gac:1", 150, 200),
        event("CUDA", "fill(int)", 120, 130),
        event("CUDA", "gemm(int)", 170, 190),
    ]
    assert names_by_mark(trace) == {0: ("gemm", "reduce"), 1: ("gemm",)}


def test_a_gpu_has_one_file_name() -> None:
    assert device.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert device.slug("NVIDIA GeForce RTX 4090 (Laptop)") == "nvidia-geforce-rtx-4090-laptop"


def test_the_local_profile_is_the_saved_one_then_the_shipped_one(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GAC_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    shipped = tmp_path / "shipped" / "nvidia-h100-80gb-hbm3.jsonl"
    monkeypatch.setattr(device, "shipped_profiles", lambda: (shipped,))
    assert device.local_profile() == shipped
    saved = device.default_path("NVIDIA H100 80GB HBM3")
    saved.parent.mkdir()
    saved.touch()
    assert device.local_profile() == saved == tmp_path / "profiles" / "nvidia-h100-80gb-hbm3.jsonl"


def test_there_is_no_local_profile_without_a_gpu_or_for_an_unknown_one(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.local_profile() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Unheard Of")
    assert device.local_profile() is None
