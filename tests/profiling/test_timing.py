import numpy as np
import pytest

from gac.profiling.timing import Timing, at_steady_clock, half_width, plan_launches, sample_until

L2 = 50_000_000


class FakeClock:
    """Normal samples of a given relative spread; counts how many were taken."""

    def __init__(self, spread: float) -> None:
        self.random = np.random.default_rng(0)
        self.spread = spread
        self.taken = 0

    def __call__(self, count: int) -> list[float]:
        self.taken += count
        return list(1000 * (1 + self.spread * self.random.standard_normal(count)))


def test_steady_samples_stop_after_one_batch() -> None:
    clock = FakeClock(0.001)
    timing = sample_until(clock)
    assert timing.converged
    assert timing.samples == clock.taken == 10
    assert timing.median_ns == pytest.approx(1000, rel=0.002)


def test_noisy_samples_go_on_until_the_median_is_known() -> None:
    timing = sample_until(FakeClock(0.03))
    assert timing.converged
    assert 10 < timing.samples < 60


def test_hopeless_samples_end_unconverged() -> None:
    clock = FakeClock(0.5)
    timing = sample_until(clock)
    assert not timing.converged
    assert timing.samples == clock.taken == 60


def test_the_median_ignores_an_outlier() -> None:
    timing = sample_until(lambda count: [100.0] * (count - 1) + [1e6])
    assert timing == Timing(100.0, 0.0, 10, True)


def test_half_width_is_the_notch_of_a_box_plot() -> None:
    assert half_width([1.0, 2.0, 3.0, 4.0]) == pytest.approx(1.57 * 1.5 / 2)


def takes(*clocks: int):
    """Timings at these clocks; the one at 1980 MHz says 1980 ns, and so on."""
    timings = iter([Timing(float(clock), 0.0, 10, True, clock) for clock in clocks])
    return lambda: next(timings)


def test_a_timing_at_a_steady_clock_is_taken_once() -> None:
    assert at_steady_clock(takes(1950), 1980, 1980, rest=pytest.fail).median_ns == 1950


def test_a_timing_at_a_low_clock_is_taken_again_after_a_rest() -> None:
    rests = []
    assert at_steady_clock(takes(1500, 1970), 1980, 1980, rest=lambda: rests.append(1)).median_ns == 1970
    assert rests == [1]


def test_where_the_clock_stays_low_the_take_at_the_highest_counts() -> None:
    timing = at_steady_clock(takes(1500, 1800, 1700), 1980, 1980, rest=lambda: None)
    assert (timing.median_ns, timing.converged) == (1800, True)


def test_a_clock_below_three_quarters_of_the_maximum_is_not_trusted() -> None:
    assert not at_steady_clock(takes(1000, 1000, 1000), 1980, 1980, rest=lambda: None).converged
    assert not at_steady_clock(takes(1000), 1000, 1980, rest=lambda: None).converged


@pytest.mark.parametrize(
    ("launch_ns", "bytes_each", "expected"),
    [
        (2_000, 10_000, (250, 250, True)),  # small: every launch on its own buffers, L2 flushed before each replay
        (20_000, 40_000_000, (25, 3, False)),  # the rotation passes twice L2 by itself
        (6_000_000, 300_000_000, (1, 1, False)),  # one launch passes twice L2
        (600_000, 40_000_000, (1, 1, True)),
    ],
)
def test_a_replay_is_long_enough_and_cold(launch_ns, bytes_each, expected) -> None:
    assert plan_launches(launch_ns, bytes_each, L2) == expected
