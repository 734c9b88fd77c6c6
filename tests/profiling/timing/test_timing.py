"""Timing: samples until a median is known, pools of operands, launches, names of kernels, and a GPU that fails."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from gac.core.errors import ProfileError
from gac.forms.low_rank import low_rank
from gac.profiling import folders
from gac.profiling.folders import find_profile
from gac.profiling.operators import runner_of
from gac.profiling.operators.base import Operand, name_of
from gac.profiling.records import Header, Launch, Measurement, Point
from gac.profiling.sweeps.sweep import run_sweep
from gac.profiling.table import Profile
from gac.profiling.timing import device, measure
from gac.profiling.timing.measure import launches_by_mark, short_name
from gac.profiling.timing.operands import DTYPES, Pools, random_numbers
from gac.profiling.timing.sampling import Batch, Clocks, Timing, plan_launches, sample_until
from gac_extensions.lab.kernel_names import describe

L2 = 50_000_000
CLOCKS = Clocks(1960.0, 1980)


def at_clocks(*clocks: int):
    """Batches at these clocks, one after the other; the samples at 1980 MHz say 1980 ns, and so on."""
    remaining = iter(clocks)

    def sampler(count: int) -> Batch:
        clock = next(remaining)
        return Batch([float(clock)] * count, clock)

    return sampler


@pytest.mark.parametrize(
    ("spread", "converged", "fewest", "most"), [(0.001, True, 10, 10), (0.03, True, 11, 59), (0.5, False, 60, 60)]
)
def test_samples_are_taken_until_the_median_is_known(spread, converged, fewest, most) -> None:
    random, taken = np.random.default_rng(0), []

    def sampler(count: int) -> Batch:
        taken.append(count)
        return Batch(list(1000 * (1 + spread * random.standard_normal(count))), 1970)

    timing = sample_until(sampler, CLOCKS, rest=pytest.fail)
    assert timing.converged is converged
    assert fewest <= timing.samples == sum(taken) <= most
    assert timing.median_ns == pytest.approx(1000, rel=2 * spread)


def test_two_latencies_by_chance_give_their_mean() -> None:
    chance = np.random.default_rng(1)

    def sampler(count: int) -> Batch:
        return Batch(list(chance.choice([1000.0, 1060.0], count)), 1970)

    timings = [sample_until(sampler, CLOCKS, rest=pytest.fail) for _ in range(200)]
    medians = np.array([timing.median_ns for timing in timings])
    assert abs(medians.mean() - 1030) < 3
    assert np.quantile(np.abs(medians - 1030), 0.9) < 15
    assert np.mean([timing.converged for timing in timings]) > 0.95


@pytest.mark.parametrize(
    ("clocks", "usual", "converged", "discarded"),
    [
        ((1500, 1970), 1960, True, 1),
        ((1500,) * 17, 1960, False, 16),  # it stays low: accepted, and not trusted
        ((1500,), 1510, True, 0),  # it is always low
        ((1000,) * 33, 1960, False, 32),  # throttled: never trusted
        ((1000,) * 33, 1000, False, 32),
        ((*(1000,) * 17, 1970), 1960, True, 17),  # throttled samples never mix with good ones
    ],
)
def test_a_batch_at_a_low_clock_is_discarded_and_taken_again_after_a_rest(clocks, usual, converged, discarded) -> None:
    rests = []
    timing = sample_until(at_clocks(*clocks), Clocks(usual, 1980), rest=rests.append)
    assert timing == Timing(clocks[-1], 0.0, 10, converged, clocks[-1], discarded)
    assert rests == list(range(1, discarded + 1))


def test_outliers_are_ignored_and_a_batch_that_was_queued_too_late_is_taken_again_at_once() -> None:
    timing = sample_until(lambda count: Batch([100.0] * (count - 1) + [1e6], 1970), CLOCKS, rest=pytest.fail)
    assert timing == Timing(100.0, 0.0, 10, True, 1970)
    batches = iter([Batch([2000.0] * 10, 700, late=True), Batch([1000.0] * 10, 1970)])
    timing = sample_until(lambda count: next(batches), CLOCKS, rest=pytest.fail)
    assert timing == Timing(1000.0, 0.0, 10, True, 1970, discarded=1)


@pytest.mark.parametrize(
    ("launch_ns", "bytes_each", "expected"),
    [
        (2_000, 10_000, (150, 150, True, 10)),  # small: every launch on its own buffers, L2 flushed before each replay
        (20_000, 40_000_000, (16, 8, True, 10)),  # the rotation passes six times L2, in whole rounds
        (6_000_000, 300_000_000, (1, 1, False, 10)),  # one launch passes six times L2
        (600_000, 40_000_000, (1, 1, True, 10)),
        (20_000, 15_000_000, (15, 15, True, 10)),
        (30e6, 400_000_000, (1, 1, False, 6)),  # long launches are taken in small batches
        (2e9, 400_000_000, (1, 1, False, 3)),
    ],
)
def test_a_replay_is_long_enough_and_cold(launch_ns, bytes_each, expected) -> None:
    assert plan_launches(launch_ns, bytes_each, L2, "cold") == expected


def test_a_pool_cuts_aligned_views_that_do_not_overlap_until_it_starts_again() -> None:
    pools = Pools("cpu", limit_bytes=2048)
    views = [pools.cut(Operand((10, 10), "bf16")) for _ in range(8)]
    assert [view.storage_offset() for view in views] == [0, 128, 256, 384, 512, 640, 768, 896]
    assert pools.cut(Operand((3, 50), "bf16")).storage_offset() == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_floating_point_is_normal_and_the_same_for_the_same_seed_and_integers_are_random_bits(dtype) -> None:
    first, again, other = (random_numbers(10_000, DTYPES[dtype], "cpu", seed).float() for seed in (0, 0, 1))
    assert float(first.std()) == pytest.approx(0.5, rel=0.05)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    drawn = random_numbers(10_000, torch.int32, "cpu")
    bits = torch.stack([(drawn >> bit) & 1 for bit in range(32)]).double()
    assert float((bits.mean(dim=1) - 0.5).abs().max()) < 0.03


def test_pools_hand_out_operands_of_every_dtype_one_after_the_other() -> None:
    pools = Pools("cpu", limit_bytes=4096)
    for name, dtype in DTYPES.items():
        first, second = pools.cut(Operand((3, 5), name)), pools.cut(Operand((2,), name))
        assert (first.shape, first.dtype) == ((3, 5), dtype)
        assert second.data_ptr() - first.data_ptr() == 256


def test_an_operand_that_does_not_fit_and_a_dtype_that_operands_have_no_name_for_say_so() -> None:
    pools = Pools("cpu", limit_bytes=2**20)
    assert pools.cut(Operand((2**19,), "bf16")).numel() == 2**19
    for cut in (pools.cut, pools.cut_output):
        with pytest.raises(RuntimeError, match=r"an operand of 3\.00 GiB does not fit"):
            cut(Operand((2**29, 3), "bf16"))
    assert name_of(torch.float8_e4m3fn) == "fp8"
    with pytest.raises(RuntimeError, match=r"holds torch.complex64, of which no operands are made; they are bf16, "):
        name_of(torch.complex64)


GEMVX = "internal::gemvx::kernel<int, 7, false>"
SHORT_NAMES = {
    "nvjet_sm90_tst_128x256_64x4": "nvjet_sm90_tst_128x256_64x4",
    "void cutlass::Kernel2<cutlass_75_align1>(cutlass_75::Params)": "cutlass::Kernel2<cutlass_75_align1>",
    f"std::enable_if<!(false), void>::type {GEMVX}(cublasGemvParams<int>)": GEMVX,
    "void (anonymous namespace)::fill<4>(int)": "(anonymous namespace)::fill<4>",
    "gemv2T_kernel_val<int, (bool)1>": "gemv2T_kernel_val<int, (bool)1>",
}


def test_a_kernels_name_is_kept_without_its_arguments() -> None:
    assert {name: short_name(name) for name in SHORT_NAMES} == SHORT_NAMES


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
    busy = "2 other processes on it, busy 40 % of the time while this process was idle"
    assert device._other_users([10, 77, 78], [90, 40, 100]) == busy


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
    found = [folders.local_profile("NVIDIA H200", engine) for engine in (None, "transformers", "vllm")]
    assert [path.stem for path in found if path] == ["nvidia-h200", "nvidia-h200", "nvidia-h200-vllm"]


POINTS = [Point(low_rank(4, 64, rank, 64)) for rank in range(8, 20)]
BAD = 11
KERNEL = Launch("gemm", (1, 1, 1), (32, 1, 1), 0)


class Watch:
    """Takes the place of the stopwatch: 1 us a launch, at a clock that a test can hold down."""

    stream = None

    def __init__(self, _l2_bytes: int, max_clock_mhz: int, _ranks: object) -> None:
        self.clock = self.most = max_clock_mhz

    def time(self, call_on: Callable[[int], Sequence[Callable[[], object]]], _bytes: int, _cache: str) -> Timing:
        for call in call_on(2):
            call()
        return sample_until(lambda n: Batch([1000.0] * n, self.clock), Clocks(self.most, self.most), lambda _: None)


class Gpu:
    """The made-up GPU; ``at_bad`` is what happens where rank 11 runs, and ``lost`` whether the device is then gone."""

    def __init__(self) -> None:
        self.at_bad: Callable[[Sequence[torch.Tensor]], object] = lambda _outputs: None
        self.kills = False
        self.lost = False
        self.free = 2**24

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore words")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    fake = Gpu()
    runner = runner_of("low_rank")
    run = runner.run

    def harmed(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Any:
        result = run(inputs, outputs)
        if any(BAD in tensor.shape for tensor in inputs):
            fake.lost = fake.kills
            fake.at_bad(result)
        return result

    monkeypatch.setattr(runner, "run", harmed)
    monkeypatch.setattr(measure, "Pools", lambda _device, limit: Pools("cpu", limit))
    monkeypatch.setattr(measure, "Stopwatch", Watch)
    memory = {"empty_cache": lambda: None, "mem_get_info": lambda: (fake.free, fake.free)}
    monkeypatch.setattr(measure, "_cuda", SimpleNamespace(**memory))
    monkeypatch.setattr("torch.cuda.synchronize", fake.synchronize)
    monkeypatch.setattr(measure.GpuMeasurer, "launches", lambda _self, points: [(KERNEL,)] * len(points))
    return fake


def swept(path: Path, header: Header, gpu: Gpu) -> dict[int, Measurement]:
    """The rows by rank after a run in a new process."""
    gpu.lost = False
    run_sweep(POINTS, path, measure.GpuMeasurer(header), header, progress=False)
    return {row.shape["r"]: row for row in Profile.load(path).measurements}


def check_only_bad_failed(rows: dict[int, Measurement], reason: str) -> None:
    assert {rank: len(row.passes) for rank, row in rows.items()} == {rank: 3 * (rank != BAD) for rank in range(8, 20)}
    assert rows[BAD].error is not None
    assert rows[BAD].error.startswith(reason)


def raising(failure: Exception) -> Any:
    return Mock(side_effect=failure)


@pytest.mark.parametrize(
    ("at_bad", "reason"),
    [
        (raising(torch.OutOfMemoryError("CUDA out of memory.")), "CUDA out of memory."),
        (raising(NotImplementedError("no kernel for this shape")), "no kernel for this shape"),
        (raising(RuntimeError("CUDA error:\tout of \x1b[31mluck\nmore words")), "CUDA error: out of  [31mluck"),
        (lambda outputs: [output.fill_(math.nan) for output in outputs], "wrong result: relative error "),
        (lambda outputs: [output.fill_(0.0) for output in outputs], "wrong result: relative error "),
    ],
)
def test_a_shape_that_fails_or_runs_wrong_is_marked_and_the_others_go_on(at_bad, reason, gpu, header, tmp_path) -> None:
    gpu.at_bad = at_bad
    check_only_bad_failed(swept(tmp_path / "gpu.jsonl", header, gpu), reason)


def test_a_driver_that_fails_ends_the_run_and_the_next_one_leaves_the_shape_out(gpu, header, tmp_path) -> None:
    gpu.kills, gpu.at_bad = True, raising(RuntimeError("CUDA error: unspecified launch failure"))
    with pytest.raises(ProfileError, match="the GPU failed at low_rank bf16 m=4 k=64 r=11 n=64: CUDA error: unspec"):
        swept(tmp_path / "gpu.jsonl", header, gpu)
    check_only_bad_failed(swept(tmp_path / "gpu.jsonl", header, gpu), "CUDA error: unspecified launch failure")


def test_a_shape_that_fails_in_a_later_pass_keeps_its_timings_and_is_tried_again(gpu, header, tmp_path) -> None:
    path = tmp_path / "gpu.jsonl"
    run_sweep(POINTS, path, measure.GpuMeasurer(header), header, passes=1, progress=False)
    gpu.at_bad = raising(torch.OutOfMemoryError("CUDA out of memory."))
    assert len(swept(path, header, gpu)[BAD].passes) == 1
    gpu.at_bad = lambda _outputs: None
    assert len(swept(path, header, gpu)[BAD].passes) == 3


def test_a_gpu_without_room_to_begin_with_is_named(gpu, header, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(measure, "Stopwatch", raising(torch.OutOfMemoryError("CUDA out of memory.")))
    with pytest.raises(ProfileError, match="the GPU cannot be prepared: CUDA out of memory"):
        swept(tmp_path / "gpu.jsonl", header, gpu)
    assert not (tmp_path / "gpu.jsonl").exists()


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
