"""Pools of operands: aligned, random or unset, and bounded."""

import pytest
import torch

from gac.profiling.operators.base import Operand, name_of
from gac.profiling.timing.operands import DTYPES, Pools, random_numbers


def test_a_pool_cuts_aligned_views_that_do_not_overlap_until_it_starts_again() -> None:
    pools = Pools("cpu", limit_bytes=2048)
    views = [pools.cut(Operand((10, 10), "bf16")) for _ in range(8)]
    assert [view.storage_offset() for view in views] == [0, 128, 256, 384, 512, 640, 768, 896]
    assert pools.cut(Operand((3, 50), "bf16")).storage_offset() == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_floating_point_is_normal_and_the_same_for_the_same_seed(dtype) -> None:
    first, again, other = (random_numbers(10_000, DTYPES[dtype], "cpu", seed).float() for seed in (0, 0, 1))
    assert float(first.std()) == pytest.approx(0.5, rel=0.05)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_integers_are_random_bits() -> None:
    drawn = random_numbers(10_000, torch.int32, "cpu")
    bits = torch.stack([(drawn >> bit) & 1 for bit in range(32)]).double()
    assert float((bits.mean(dim=1) - 0.5).abs().max()) < 0.03


def test_pools_hand_out_operands_of_every_dtype_one_after_the_other() -> None:
    pools = Pools("cpu", limit_bytes=4096)
    for name, dtype in DTYPES.items():
        first, second = pools.cut(Operand((3, 5), name)), pools.cut(Operand((2,), name))
        assert (first.shape, first.dtype) == ((3, 5), dtype)
        assert second.data_ptr() - first.data_ptr() == 256


def test_an_operand_that_does_not_fit_says_so() -> None:
    pools = Pools("cpu", limit_bytes=2**20)
    assert pools.cut(Operand((2**19,), "bf16")).numel() == 2**19
    for cut in (pools.cut, pools.cut_output):
        with pytest.raises(RuntimeError, match=r"an operand of 3\.00 GiB does not fit"):
            cut(Operand((2**29, 3), "bf16"))


def test_a_dtype_that_operands_have_no_name_for_says_so() -> None:
    assert name_of(torch.float8_e4m3fn) == "fp8"
    with pytest.raises(RuntimeError, match=r"holds torch.complex64, of which no operands are made; they are bf16, "):
        name_of(torch.complex64)
