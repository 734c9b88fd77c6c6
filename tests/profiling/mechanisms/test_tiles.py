import pytest

from gac.profiling.mechanisms.tiles import AttentionTile, fits, shared_limit, template_for, widest_tile

A100 = 163 * 1024
H100 = 227 * 1024

PUBLISHED = ((1, 64, 64, 128), (65, 96, 96, 64), (97, 128, 128, 64), (129, 160, 160, 32), (161, 256, None, 32))
"""Published tiers of FlashAttention-2 on an A100: head_dims from and to, template (192-256 in one), block of keys."""


@pytest.mark.parametrize(("low", "high", "template", "cols"), PUBLISHED)
def test_the_budget_predicts_the_published_tiles_of_an_a100(low, high, template, cols) -> None:
    for head_dim in range(max(low, 33), high + 1):
        tile = widest_tile(head_dim, A100)
        assert (tile.rows, tile.cols) == (128, cols)
        assert tile.head_dim == (template or template_for(head_dim))


def test_the_bytes_of_a_tile() -> None:
    tile = AttentionTile(head_dim=128, rows=128, cols=64)
    sizes = (tile.query, tile.key, tile.value, tile.score, tile.accumulator)
    assert [size // 1024 for size in sizes] == [32, 16, 16, 32, 64]
    assert (tile.shared, tile.total) == (64 * 1024, 160 * 1024)
    assert AttentionTile(head_dim=128, rows=128, cols=64, stages=2).shared == 96 * 1024


def test_from_192_on_no_block_of_128_queries_fits_an_a100() -> None:
    assert [fits(widest_tile(dim, A100), A100) for dim in (64, 96, 128, 160, 192, 256)] == [True] * 4 + [False] * 2


def test_an_h100_has_room_for_wider_tiles() -> None:
    assert [widest_tile(dim, H100).cols for dim in (64, 96, 128, 160, 192, 256)] == [128, 128, 128, 64, 64, 32]


def test_the_smallest_template_that_holds_a_head_dim_serves_it() -> None:
    assert [template_for(dim) for dim in (1, 64, 107, 128, 132, 256)] == [32, 64, 128, 128, 160, 256]
    assert template_for(257) is None
    assert template_for(132, (64, 128, 192, 256)) == 192


def test_shared_memory_by_compute_capability() -> None:
    assert (shared_limit("8.0"), shared_limit("9.0"), shared_limit("3.5")) == (A100, H100, None)
