from collections import Counter
from math import prod

import msgspec
import pytest

from gac.profiling.records import Launch
from gac.profiling.table import Profile
from gac_extensions.lab.kernel_names import describe
from gac_extensions.lab.mechanisms.causes import Gemm, Waves, gemms_of, occupancy, read_kernel, waves_of

NVJET = describe("nvjet_sm90_tst_72x256_64x5_1x2_h_bz_TNN")
CUTLASS = describe("cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>")
INT4 = "at::native::tinygemm_m16n8k16_chunk_kernel<8, 8>"


def ctas(grid: tuple[int, int, int], threads: int = 256, shared: int = 180_000, name: str = CUTLASS.name) -> Launch:
    return Launch(name, grid, (threads, 1, 1), shared)


def test_a_large_tile_fills_an_sm_and_small_ones_bound_the_waves_from_below(header) -> None:
    alone, shared = (waves_of(ctas((9, 32, 1), shared=size), CUTLASS, header) for size in (180_000, 65536))
    assert (alone, alone.last) == (Waves(288, 132, exact=True), pytest.approx(24 / 132))
    assert (shared, shared.count, shared.last) == (Waves(288, 3 * 132, exact=False), 1, None)


def test_occupancy_by_shared_memory_threads_and_slots(header) -> None:
    by_shared = [occupancy(ctas((1, 1, 1), threads=128, shared=shared), header) for shared in (232448, 98304, 1024, 0)]
    assert by_shared == [1, 2, 16, 16]
    assert occupancy(ctas((1, 1, 1), threads=32, shared=0), header) == 32
    ada = msgspec.structs.replace(header, compute_capability="8.9", shared_memory_bytes=99 * 1024)
    assert [occupancy(ctas((1, 1, 1), threads, 0), ada) for threads in (512, 32)] == [3, 24]


@pytest.mark.parametrize(
    ("launch", "gemm", "split", "tiles"),
    [
        (ctas((8, 1, 16)), Gemm(m=1024, k=8192, n=126), True, 8 * 16),  # the shares of k
        (ctas((8, 1, 1)), Gemm(m=1024, k=8192, n=126), False, 8),
        (ctas((16, 1, 32)), Gemm(m=512, k=66, n=512, batch=32), False, 16 * 32),  # the batch
        (ctas((1, 512, 2), name=INT4), Gemm(m=30, k=4096, n=4096), False, 512 * 2),  # the rows
        (ctas((32, 3, 1)), Gemm(m=1024, k=1022, n=1152), False, 8 * 9),  # empty places are no tiles
    ],
)
def test_tiles_of_a_grid(launch, gemm, split, tiles, header) -> None:
    kernel = read_kernel(launch, gemm)
    assert kernel.split_k == split
    assert waves_of(launch, kernel, header, gemm).tiles == tiles


def test_a_persistent_kernel_needs_the_shape_and_a_gemv_has_no_tiles(header) -> None:
    launch, gemv = Launch(NVJET.name, (2, 66, 1), (384, 1, 1), 0), describe("gemv2T_kernel_val<int, int, float>")
    assert waves_of(launch, NVJET, header) is None
    assert waves_of(ctas((1024, 1, 1), name=gemv.name), gemv, header) is None
    assert waves_of(launch, NVJET, header, Gemm(m=2048, k=4096, n=2344)) == Waves(264, 132)


def test_grids_of_an_h100_hold_the_tiles() -> None:
    """nvjet launches a CTA a tile, up to 132 or with clusters of 4 and 8 sometimes 120; CUTLASS may have more."""
    profile = Profile.load("nvidia-h100-80gb-hbm3")
    agreed: Counter[tuple[str, bool]] = Counter()
    for row in profile.measurements:
        main = [launch for launch in row.launches if describe(launch.name).main]
        for launch, gemm in zip(main, gemms_of(row.point.operation), strict=False):
            kernel = read_kernel(launch, gemm)
            waves = waves_of(launch, kernel, profile.header, gemm)
            if waves is None or kernel.family not in {"nvjet", "cutlass"} or kernel.tile is None:
                continue
            places = prod(launch.grid)
            if kernel.family == "cutlass":
                agreed["cutlass", waves.tiles <= places] += 1
            elif not kernel.split_k:
                agreed["nvjet", places == waves.tiles or 120 <= places < waves.tiles] += 1
    assert set(agreed) == {("nvjet", True), ("cutlass", True)}
    assert agreed["nvjet", True] > 10_000
    assert agreed["cutlass", True] > 1000
