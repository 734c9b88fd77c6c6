"""The roofline: terms of a GEMM that only grow with it, and a fit that finds what they were multiplied with."""

from functools import partial

import numpy as np
import pytest

from gac.profiling.modelled.roofline import Gpu, fitted, gemm_terms, row_terms

GPU = Gpu(sm_count=132, l2_bytes=50_000_000)


@pytest.mark.parametrize("rows", [1, 64, 65, 1024, "low-bit"])
@pytest.mark.parametrize("axis", ["k", "n"])
def test_no_term_falls_where_a_gemm_gets_longer(rows: int | str, axis: str) -> None:
    terms_of = row_terms if rows == "low-bit" else partial(gemm_terms, rows)
    long, same = np.arange(8, 8192, 8), np.full(1023, 4096)
    terms = terms_of(*((long, same) if axis == "k" else (same, long)), GPU, 2.0 * long * same)
    assert terms.min() >= 0
    assert (np.diff(terms, axis=0) >= -1e-12).all()


def test_steps_of_one_row_are_whole_behind_the_first_and_waves_always() -> None:
    """32 outputs of each of 132 SMs are 4224."""
    depths, widths = np.array([1024, 2048, 2304, 4096, 2304]), np.array([64, 64, 64, 4224, 4232])
    terms = row_terms(depths, widths, GPU, 0.5 * depths * widths)
    assert terms[:, 3].tolist() == [0.5, 1, 2, 2, 4]


def test_the_fit_finds_the_coefficients_of_what_it_is_a_sum_of() -> None:
    widths = np.arange(64, 8192, 64)
    depths = np.resize([512, 1024, 4096], len(widths))
    terms = gemm_terms(1024, depths, widths, GPU, 2.0 * depths * widths)
    ns = terms @ np.linspace(100, 1000, terms.shape[1])
    assert terms @ fitted(terms, ns) == pytest.approx(ns, rel=1e-6)
