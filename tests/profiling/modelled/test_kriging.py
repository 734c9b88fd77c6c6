"""Kriging: it goes through what was measured, carries stairs along, and says what it would miss."""

import numpy as np
import pytest

from gac.profiling.modelled.kriging import MOST, Kriging, drawn

WIDTHS = np.arange(256, 4097, 128)


def shapes_at(k: int) -> np.ndarray:
    return np.column_stack([np.full(len(WIDTHS), k), WIDTHS])


def stairs(widths: np.ndarray) -> np.ndarray:
    return 0.2 * (widths // 1024 % 2)


def test_it_gives_back_what_it_was_fitted_to() -> None:
    shapes = np.vstack([shapes_at(1024), shapes_at(4096)])
    field = Kriging.fit(shapes, stairs(shapes[:, 1]))
    assert field.predict(shapes) == pytest.approx(stairs(shapes[:, 1]), abs=0.02)


def test_stairs_along_one_axis_are_found_at_sizes_of_the_other_that_were_not_measured() -> None:
    shapes = np.vstack([shapes_at(1024), shapes_at(4096)])
    between = Kriging.fit(shapes, stairs(shapes[:, 1])).predict(shapes_at(2048))
    assert np.corrcoef(between, stairs(WIDTHS))[0, 1] > 0.95


def test_what_is_missed_without_a_block_is_what_a_fit_without_it_misses() -> None:
    shapes = np.vstack([shapes_at(1024), shapes_at(2048)])
    residuals = np.random.default_rng(1).normal(size=len(shapes))
    blocks = np.arange(len(shapes)) % 3
    missed = Kriging.fit(shapes, residuals).left_out(blocks)
    for block in range(3):
        out = blocks == block
        without = Kriging.fit(shapes[~out], residuals[~out])
        assert missed[out] == pytest.approx(residuals[out] - without.predict(shapes[out]), abs=1e-8)


def test_of_many_shapes_the_same_ones_are_drawn_each_time() -> None:
    assert drawn(5).tolist() == [0, 1, 2, 3, 4]
    assert len(drawn(3 * MOST)) == MOST
    assert (drawn(3 * MOST) == drawn(3 * MOST)).all()
