"""The padded dim of each strategy."""

from collections.abc import Callable

import pytest

from gac.core.errors import GacError
from gac.repairs.contract import STRATEGIES, ShapeContract


@pytest.mark.parametrize(
    ("strategy", "becomes"),
    [
        ("minimal", {1: 8, 107: 112, 120: 120, 655: 656, 1638: 1640, 2548: 2552}),
        ("optimal", {1: 16, 107: 112, 120: 128, 655: 656, 1638: 1648, 2548: 2560}),
        ("predefined", {1: 32, 97: 128, 107: 128, 128: 128, 129: 160, 257: 320, 655: 704, 1638: 1664, 2548: 2560}),
        # 107 to 128 would add 20 % and to 112 adds 5 %; 117 to 128 adds 9 %; every choice for 41 adds more than 10 %.
        ("tradeoff", {41: 41, 107: 112, 117: 128, 113: 120, 120: 120, 655: 672, 1638: 1664, 2548: 2560}),
    ],
)
def test_a_strategy(strategy: str, becomes: dict[int, int]) -> None:
    contract = ShapeContract.named(strategy)
    assert {dim: contract.becomes(dim) for dim in becomes} == becomes


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "profile"])
def test_a_dim_never_shrinks_and_then_stays(strategy: str) -> None:
    contract = ShapeContract.named(strategy)
    for dim in range(1, 600):
        grown = contract.becomes(dim)
        assert grown >= dim
        assert contract.becomes(grown) == grown


@pytest.mark.parametrize(
    ("dim", "limit", "latency", "becomes"),
    [
        (1023, None, {1000: 10, 1024: 300, 1030: 900, 1032: 310, 1088: 290, 1152: 350}, 1088),
        (1023, None, {1024: 10_050, 1032: 10_000, 1040: 10_200}, 1024),  # of dims as cheap the smallest
        (1000, 0.05, {1000: 900, 1024: 300, 1088: 200}, 1024),
    ],
)
def test_the_cheapest_measured_dim(dim: int, limit: float | None, latency: dict[int, int], becomes: int) -> None:
    assert ShapeContract.named("profile").limited(limit).becomes(dim, latency=latency) == becomes


def test_a_dim_stays_where_every_choice_is_too_large() -> None:
    assert ShapeContract.named("minimal").becomes(61, most=62) == 61
    assert ShapeContract.named("minimal").limited(0.01).becomes(107) == 107


def test_a_contract_of_ones_own() -> None:
    contract = ShapeContract("mine", steps=(128, 64), dims=(64, 192), most_overhead=0.5)
    assert [contract.becomes(dim) for dim in (60, 65, 129, 193, 200, 250)] == [64, 65, 192, 256, 256, 256]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ShapeContract.named("minimum"), "strategy 'minimum' is unknown; .*Did you mean 'minimal'?"),
        (lambda: ShapeContract.named("minimal").limited(-0.1), "a maximum overhead of -0.1"),
        (lambda: ShapeContract.named("minimal").limited(float("nan")), "a maximum overhead of nan"),
        (lambda: ShapeContract("mine", steps=(), dims=()), "expected a positive step at least"),
        (lambda: ShapeContract("mine", steps=(0,), dims=()), "expected a positive step at least"),
        (lambda: ShapeContract("mine", steps=(8,), dims=(64, 32)), "and dims that rise"),
    ],
)
def test_contracts_that_are_invalid(make: Callable[[], ShapeContract], words: str) -> None:
    with pytest.raises(GacError, match=words):
        make()
