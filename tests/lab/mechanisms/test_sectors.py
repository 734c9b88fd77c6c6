import pytest

from gac.lab.mechanisms.sectors import bank_conflicts, fetched_over_used, lines_touched, row_alignment, vector_bytes


def test_rows_begin_at_the_largest_power_of_two_that_divides_them() -> None:
    assert [row_alignment(size) for size in (214, 208, 224, 256, 2048)] == [2, 16, 32, 128, 128]
    assert [vector_bytes(size) for size in (214, 212, 216, 224, 256)] == [2, 4, 8, 16, 16]


def test_bytes_fetched_against_bytes_used() -> None:
    assert fetched_over_used(224) == 1.0
    assert fetched_over_used(208) == pytest.approx(32 * 7 / 208)
    assert fetched_over_used(16) == 2.0


def test_a_segment_of_a_row_lies_on_up_to_two_cache_lines() -> None:
    assert lines_touched(256) == 1.0
    assert lines_touched(192) == 1.5
    assert lines_touched(2736) == 1.875


def test_bank_conflicts_of_rows_as_they_lie() -> None:
    assert [bank_conflicts(stride) for stride in (64, 128, 144, 192, 256, 272)] == [4, 8, 1, 4, 8, 1]
