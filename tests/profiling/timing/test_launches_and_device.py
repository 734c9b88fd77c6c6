from pathlib import Path

import pytest

from gac.profiling import folders
from gac.profiling.records import Launch
from gac.profiling.timing import device
from gac.profiling.timing.measure import launches_by_mark, short_name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("nvjet_sm90_tst_128x256_64x4", "nvjet_sm90_tst_128x256_64x4"),
        ("void cutlass::Kernel2<cutlass_75_align1>(cutlass_75::Params)", "cutlass::Kernel2<cutlass_75_align1>"),
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


def host(name: str, start: float, end: float) -> dict[str, object]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": end - start}


def launch(start: float, correlation: int, kind: str = "cuda_runtime") -> dict[str, object]:
    return {"cat": kind, "name": "launch", "ts": start, "dur": 1, "args": {"correlation": correlation}}


def kernel(name: str, start: float, correlation: int) -> dict[str, object]:
    details = {"correlation": correlation, "grid": [4, 2, 1], "block": [128, 1, 1], "shared memory": 1024}
    return {"cat": "kernel", "name": name, "ts": start, "dur": 5, "args": details}


def test_kernels_belong_to_the_mark_during_which_the_host_launched_them() -> None:
    trace = [
        {"ph": "M", "name": "process_name", "ts": 0},
        host("gac:0", 0, 100),
        launch(10, 1),
        launch(20, 2, "cuda_driver"),
        kernel("reduce(int)", 60, 2),
        kernel("gemm(int)", 30, 1),
        launch(120, 3),
        kernel("pack(int)", 125, 3),
        host("gac:1", 150, 200),
        launch(160, 4),
        kernel("gemm(int)", 250, 4),
        kernel("stray(int)", 255, 99),
    ]
    extents = ((4, 2, 1), (128, 1, 1), 1024)
    assert launches_by_mark(trace) == {
        0: (Launch("gemm", *extents), Launch("reduce", *extents)),
        1: (Launch("gemm", *extents),),
    }


def test_others_on_the_gpu_are_said(monkeypatch) -> None:
    monkeypatch.setattr(device.os, "getpid", lambda: 10)
    assert device._other_users([], [0, 0, 0]) == ""
    assert device._other_users([10], [0, 3, 0]) == ""
    assert device._other_users([77], [0, 0, 0]) == ""  # this process, as the driver counts outside a container
    assert device._other_users([10, 77], [0, 0, 0]) == "1 other process on it"
    assert device._other_users([10, 77, 78], [90, 40, 100]) == (
        "2 other processes on it, busy 40 % of the time while this process was idle"
    )


def test_a_gpus_profile_is_the_saved_one_then_the_shipped_one(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GAC_HOME", str(tmp_path))
    shipped = folders.local_profile("NVIDIA H100 80GB HBM3")
    assert shipped is not None
    assert shipped.name == "nvidia-h100-80gb-hbm3.jsonl"
    saved = folders.default_path("NVIDIA H100 80GB HBM3")
    saved.parent.mkdir()
    saved.touch()
    assert folders.local_profile("NVIDIA H100 80GB HBM3") == saved == tmp_path / "profiles" / shipped.name
    assert folders.local_profile("NVIDIA GeForce RTX 4090 (Laptop)") is None
