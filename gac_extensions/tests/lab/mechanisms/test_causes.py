from dataclasses import replace

import numpy as np
import pytest

from gac.profiling.records import Launch
from gac.profiling.table import Profile, Sweep
from gac_extensions.lab.cliffs import find_cliffs
from gac_extensions.lab.mechanisms.causes import Cause, cause_between, causes_of, edge_causes

NVJET = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNN"
SMALL = "nvjet_sm90_tst_64x64_64x13_1x4_h_bz_TNT"
ALIGN2 = "cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x3_tn_align2>"
ALIGN1 = "cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>"
REDUCE = "cublasLt::splitKreduce_kernel<32, 16, int, float>"
FLASH = "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<{}, 128, {}, 4, false>>"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0"
COPY = "at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>"
FILL = "at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<c10::BFloat16>>"


def ran(*names: str, grid: tuple[int, int, int] = (132, 1, 1)) -> tuple[Launch, ...]:
    return tuple(Launch(name, grid, (128, 1, 1), 0) for name in names)


EVEN, CHECKED = (
    f"pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<192, 128, 64, 8, false, Flash_kernel_traits<1> >"
    f"{', false' * 5}, {even}, false, false>"
    for even in ("true", "false")
)


def cause(slow, fast, header, where: str = "copy n=7 8") -> Cause | None:
    """Cause between two dims of a sweep, written as ``operator axis=slow fast fixed=size ...``."""
    operator, moved, larger, *rest = where.split()
    (axis, smaller), fixed = moved.split("="), tuple((name, int(size)) for name, size in (x.split("=") for x in rest))
    dims = np.array([int(smaller), int(larger)])
    sweep = Sweep(operator, "bf16", "cold", axis, fixed, dims, np.ones(2), np.zeros(2), (slow, fast))
    return cause_between(sweep, *dims.tolist(), header)


CAUSES = {
    "lower alignment tier": (ran(ALIGN2), ran(NVJET), "alignment tier: cutlass_80_tensorop_bf16_s16816gemm_bf16_"),
    "the GEMM of a pair that fell": (
        ran(NVJET, REDUCE, ALIGN1),
        ran(NVJET, REDUCE, NVJET),
        "alignment tier: cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1 (sm75, align1, grid 132x1x1, ",
    ),
    "another backend, even with copies before it": (
        ran(FILL, COPY, FLASH.format(128, 64)),
        ran(CUDNN),
        "template: pytorch_flash::flash_fwd_kernel<128, 128, 64> (",
    ),
    "copies that the rescue does without": (
        ran(COPY, COPY, FLASH.format(128, 64)),
        ran(FLASH.format(128, 64)),
        "extra kernels: 3 kernels ran instead of 1; more than at the rescue: copy: at::native::elementwise_kernel",
    ),
    "fewer kernels than the rescue": (ran(NVJET), ran(NVJET, COPY), "kernel switch: 1 kernels ran instead of 2"),
    "another kernel of the same tier": (ran(SMALL), ran(NVJET), f"kernel switch: {SMALL} ("),
    "another grid for the same tiles": (
        ran(ALIGN2, grid=(64, 16, 1)),
        ran(ALIGN2, grid=(32, 16, 3)),
        "kernel switch: cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x3_tn_align2 (sm80, align2, grid 64x16x1, ",
        "linear k=1000 1024 m=1024 n=4096",
    ),
    "bounds checks on the head_dim": (
        ran(CHECKED),
        ran(EVEN),
        "kernel switch: pytorch_flash::flash_fwd_kernel<192, 128, 64> (sm80, align8, head_dim 192, is_even_K false",
    ),
    "rows that start at smaller powers of two": (
        ran(SMALL),
        ran(SMALL),
        "row alignment: the same kernels ran on rows that start at multiples of 16 bytes instead of 128",
        "linear k=1368 1408 m=1024 n=576",
    ),
    "tiles, where the results alone are aligned differently": (
        ran(SMALL),
        ran(SMALL),
        f"tile padding: {SMALL} (sm90, align8, grid 132x1x1, 160 tiles in 2 waves, the last 21% full, 5.0% padding)",
        "linear n=608 640 m=1024 k=4096",
    ),
    "nothing recorded": ((), ran(NVJET), None),
}


@pytest.mark.parametrize(
    ("slow", "fast", "expected", "where"), [(*case, "copy n=7 8")[:4] for case in CAUSES.values()], ids=CAUSES
)
def test_strongest_cause(slow, fast, expected, where, header) -> None:
    result = cause(slow, fast, header, where)
    assert (result is None) == (expected is None)
    if result is not None:
        assert f"{result.kind}: {result.evidence}".startswith(expected)
        assert result.slow in {launch.name for launch in slow}
        assert result.fast in {"", *(launch.name for launch in fast)}


def test_every_collapsed_dim_of_a_sweep_has_its_cause(header) -> None:
    dims = np.arange(1016, 1033)
    kernels = [NVJET if dim % 8 == 0 else ALIGN2 if dim % 2 == 0 else ALIGN1 for dim in dims.tolist()]
    ns = np.array([{NVJET: 32.0, ALIGN2: 82.0, ALIGN1: 168.0}[kernel] for kernel in kernels])
    fixed = (("m", 1024), ("k", 4096), ("n", 4096))
    launches = tuple(ran(kernel, kernel) for kernel in kernels)
    sweep = Sweep("low_rank", "bf16", "cold", "r", fixed, dims, ns, 0.001 * ns, launches)
    causes = causes_of(sweep, find_cliffs(sweep), header)
    assert causes[0].slow == ALIGN1
    assert {cause.kind for cause in causes} == {"alignment tier"}
    blind = replace(sweep, launches=((),) * len(dims))
    assert causes_of(blind, find_cliffs(blind), header) == (None,) * 14


def test_columns_that_no_kernel_reads(profile_file, header) -> None:
    """Widths of w4a16: where kernels cannot read the columns, an unpacking and a GEMM run."""
    for name in ("vector", "unpack", NVJET):
        profile_file.kernel(name, 128, 0)
    for k in range(4000, 4129, 8):
        read, unpacked = (10_000.0, [[0, 32, 1, 1]]), (300_000.0, [[1, 32, 1, 1], [2, 32, 1, 1]])
        ns, launches = unpacked if k % 32 else read
        profile_file.row("linear", {"m": 1, "k": k, "n": 4096}, ns, dtype="w4a16", launches=launches)
    sweep = Profile.load(profile_file.write()).rows_of("linear", {"m": 1, "n": 4096}, "k", "w4a16")
    causes = causes_of(sweep, find_cliffs(sweep), header)
    assert {(cause.kind, cause.slow, cause.fast) for cause in causes} == {("no kernel", "unpack", "vector")}
    assert any(cause.evidence.startswith("a weight has 4008 columns, no multiple of 32: ") for cause in causes)


# --- the edges of staircases

BIG = "cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_64x3_tn_align8>"


@pytest.mark.parametrize(
    ("after", "shared", "kind", "evidence"),
    [
        (BIG, 180_000, "wave", "132 tiles in 1 wave, the last 100% full, 0.0% padding)"),
        (BIG.replace("256x128", "128x128"), 180_000, "kernel switch", ""),
        (BIG, 50_000, None, ""),  # waves that an SM may hold at once
    ],
)
def test_cause_of_a_step_from_33_to_34_tiles(after, shared, kind, evidence, header) -> None:
    dims = np.arange(4096, 4609, 128)
    ns = np.where(dims > 4224, 60.0, 30.0)
    names = [after if dim > 4224 else BIG for dim in dims.tolist()]
    launches = tuple(
        (Launch(name, (4, m // 128, 1), (256, 1, 1), shared),) for name, m in zip(names, dims.tolist(), strict=True)
    )
    sweep = Sweep("linear", "bf16", "cold", "m", (("k", 4096), ("n", 1024)), dims, ns, 0.001 * ns, launches)
    assert find_cliffs(sweep).sweet_spots.tolist() == [4224]
    (result,) = edge_causes(sweep, find_cliffs(sweep), header)
    assert (result and (result.kind, result.slow, result.fast)) == (kind and (kind, after, BIG))
    assert result is None or result.evidence.endswith(evidence)
    assert edge_causes(replace(sweep, launches=((),) * len(dims)), find_cliffs(sweep), header) == (None,)
