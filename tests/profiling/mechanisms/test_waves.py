import pytest

from gac.forms import Operation, linear, low_rank
from gac.profiling.mechanisms.kernels import describe
from gac.profiling.mechanisms.waves import Gemm, Waves, gemms_of, padding, tile_count, waves_of
from gac.profiling.records import Launch

NVJET = describe("nvjet_sm90_tst_72x256_64x5_1x2_h_bz_TNN")
CUTLASS = describe("cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>")


def test_tiles_waves_and_the_last_wave() -> None:
    waves = Waves(tiles=265, at_once=132)
    assert (waves.count, waves.last) == (3, pytest.approx(1 / 132))
    assert (Waves(264, 132).count, Waves(264, 132).last) == (2, 1.0)


def test_the_first_side_of_a_tile_lies_along_the_features() -> None:
    assert tile_count(Gemm(m=1024, k=4096, n=2344), (72, 256)) == 33 * 4
    assert tile_count(Gemm(m=128, k=64, n=128, batch=8), (128, 128)) == 8


def test_padding_is_what_the_tiles_cover_beyond_the_output() -> None:
    assert padding(Gemm(m=128, k=64, n=96), (128, 128)) == pytest.approx(0.25)
    assert padding(Gemm(m=128, k=64, n=128), (128, 128)) == 0


def test_the_grid_counts_the_tiles_of_a_kernel_that_is_not_persistent() -> None:
    assert waves_of(Launch(CUTLASS.name, (9, 32, 1), (256, 1, 1), 0), CUTLASS, 132) == Waves(288, 132)


def test_a_persistent_kernel_needs_the_shape() -> None:
    launch = Launch(NVJET.name, (2, 66, 1), (384, 1, 1), 0)
    assert waves_of(launch, NVJET, 132) is None
    assert waves_of(launch, NVJET, 132, Gemm(m=2048, k=4096, n=2344)) == Waves(264, 132)


def test_a_gemv_makes_no_tiles() -> None:
    gemv = describe("gemv2T_kernel_val<int, int, float>")
    assert waves_of(Launch(gemv.name, (1024, 1, 1), (128, 1, 1), 0), gemv, 132) is None


def test_the_gemms_of_an_operation() -> None:
    assert gemms_of(linear(4, 8, 16)) == (Gemm(4, 8, 16),)
    assert gemms_of(low_rank(4, 8, 2, 16)) == (Gemm(4, 8, 2), Gemm(4, 2, 16))
    shared = Operation("low_rank_shared", (("m", 4), ("k", 8), ("r", 2), ("n", 16), ("pairs", 2)))
    assert gemms_of(shared) == (Gemm(4, 8, 4), Gemm(4, 2, 16), Gemm(4, 2, 16))
    batched = Operation("batched_gemm", (("b", 3), ("m", 4), ("k", 8), ("n", 16)))
    assert gemms_of(batched) == (Gemm(4, 8, 16, batch=3),)
    assert gemms_of(Operation("copy", (("n", 4),))) == ()
