import json

import pytest

from gac.lab.mechanisms.flash import RETIRED, AttentionTile, flash_tile, template_for, widest_tile
from gac.profiling.folders import find_profile
from gac.profiling.kernel_names import describe
from gac.profiling.operators.attention import FLASH_TEMPLATES

A100, H100, ADA = (kib * 1024 for kib in (163, 227, 99))

PUBLISHED = ((1, 64, 64, 128), (65, 96, 96, 64), (97, 128, 128, 64), (129, 160, 160, 32), (161, 256, None, 32))
"""Published tiers of FlashAttention-2 on an A100: head_dims from and to, template (192-256 in one), block of keys."""


@pytest.mark.parametrize(("low", "high", "template", "cols"), PUBLISHED)
def test_the_studys_heuristic_reproduces_the_published_tiles_of_an_a100(low, high, template, cols) -> None:
    for head_dim in range(max(low, 33), high + 1):
        tile = widest_tile(head_dim, A100)
        assert (tile.rows, tile.cols) == (128, cols)
        assert tile.head_dim == (template or template_for(head_dim))


def test_the_bytes_of_a_tile() -> None:
    tile = AttentionTile(head_dim=128, rows=128, cols=64)
    assert (tile.shared, tile.total) == ((32 + 16 + 16) * 1024, (64 + 32 + 64) * 1024)


FULL, HALF, QUARTER = (128, 128, 4), (128, 64, 4), (128, 32, 4)
WIDE, SQUARE = (128, 64, 8), (64, 64, 4)


@pytest.mark.parametrize(
    ("capability", "limit", "causal", "expected"),
    [
        ("8.0", A100, False, [FULL, FULL, HALF, HALF, QUARTER, WIDE, WIDE, WIDE]),
        ("9.0", H100, True, [FULL, FULL, HALF, HALF, QUARTER, WIDE, WIDE, SQUARE]),
        ("8.6", ADA, False, [FULL, FULL, HALF, QUARTER, WIDE, WIDE, SQUARE, SQUARE]),
        ("8.9", ADA, True, [FULL, FULL, SQUARE, SQUARE, SQUARE, WIDE, SQUARE, SQUARE]),
        ("8.7", A100, False, [FULL, FULL, HALF, QUARTER, WIDE, WIDE, WIDE, WIDE]),
    ],
)
def test_the_tiles_that_flash_attentions_source_has(capability, limit, causal, expected) -> None:
    tiles = [flash_tile(one, capability, limit, causal=causal) for one in FLASH_TEMPLATES]
    assert [(tile.rows, tile.cols, tile.warps) for tile in tiles] == expected
    assert all(tile.shared <= limit for tile in tiles)


def test_the_h100_ran_the_tiles_of_the_source_with_the_shared_memory_of_q_k_and_v() -> None:
    lines = map(json.loads, find_profile("nvidia-h100-80gb-hbm3").read_text().splitlines())
    ran = {}
    for line in lines:
        if line["record"] == "kernel" and describe(line["name"]).family == "flash":
            kernel = describe(line["name"])
            if not kernel.split_k:
                ran[kernel.template_d] = (kernel.tile, line["block"][0] // 32, line["shared_bytes"])
    assert sorted(ran) == [one for one in FLASH_TEMPLATES if one not in RETIRED]
    for template, recorded in ran.items():
        tile = flash_tile(template, "9.0", H100)
        assert recorded == ((tile.rows, tile.cols), tile.warps, tile.shared)


def test_the_smallest_template_that_holds_a_head_dim_serves_it() -> None:
    assert [template_for(dim) for dim in (1, 64, 107, 128, 132, 256)] == [32, 64, 128, 128, 160, 256]
    assert template_for(257) is None
