import numpy as np
import pytest

from gac.profiling.timing.sampling import Batch, Clocks, Timing, half_width, plan_launches, sample_until

L2 = 50_000_000
CLOCKS = Clocks(1960.0, 1980)


class FakeClock:
    """Normal samples of a given relative spread; counts how many were taken."""

    def __init__(self, spread: float) -> None:
        self.random = np.random.default_rng(0)
        self.spread = spread
        self.taken = 0

    def __call__(self, count: int) -> Batch:
        self.taken += count
        return Batch(list(1000 * (1 + self.spread * self.random.standard_normal(count))), 1970)


def at_clocks(*clocks: int):
    """Batches at these clocks, one after the other; the samples at 1980 MHz say 1980 ns, and so on."""
    left = iter(clocks)

    def sampler(count: int) -> Batch:
        clock = next(left)
        return Batch([float(clock)] * count, clock)

    return sampler


def test_steady_samples_stop_after_one_batch() -> None:
    clock = FakeClock(0.001)
    timing = sample_until(clock, CLOCKS, rest=pytest.fail)
    assert timing.converged
    assert timing.samples == clock.taken == 10
    assert timing.median_ns == pytest.approx(1000, rel=0.002)


def test_noisy_samples_go_on_until_the_median_is_known() -> None:
    timing = sample_until(FakeClock(0.03), CLOCKS, rest=pytest.fail)
    assert timing.converged
    assert 10 < timing.samples < 60


def test_hopeless_samples_end_unconverged() -> None:
    clock = FakeClock(0.5)
    timing = sample_until(clock, CLOCKS, rest=pytest.fail)
    assert not timing.converged
    assert timing.samples == clock.taken == 60


def test_the_median_ignores_an_outlier() -> None:
    timing = sample_until(lambda count: Batch([100.0] * (count - 1) + [1e6], 1970), CLOCKS, rest=pytest.fail)
    assert timing == Timing(100.0, 0.0, 10, True, 1970)


def test_two_latencies_by_chance_give_their_mean() -> None:
    chance = np.random.default_rng(1)
    timings = [
        sample_until(lambda count: Batch(list(chance.choice([1000.0, 1060.0], count)), 1970), CLOCKS, rest=pytest.fail)
        for _ in range(200)
    ]
    medians = np.array([timing.median_ns for timing in timings])
    assert abs(medians.mean() - 1030) < 3
    assert np.quantile(np.abs(medians - 1030), 0.9) < 15
    assert np.mean([timing.converged for timing in timings]) > 0.95


def test_a_mean_with_an_outlier_is_ignored() -> None:
    batches = iter([[1000.0, *[1060.0] * 4, *[1000.0] * 5], *[[1e6, *[1030.0] * 9]] * 5])
    timing = sample_until(lambda count: Batch(next(batches), 1970), CLOCKS, rest=pytest.fail)
    assert timing.median_ns == pytest.approx(1030, rel=0.02)


def test_half_width_is_the_notch_of_a_box_plot() -> None:
    assert half_width([1.0, 2.0, 3.0, 4.0]) == pytest.approx(1.57 * 1.5 / 2)


def test_a_batch_at_a_low_clock_is_discarded_and_taken_again_after_a_rest() -> None:
    rests = []
    timing = sample_until(at_clocks(1500, 1970), CLOCKS, rest=rests.append)
    assert timing == Timing(1970.0, 0.0, 10, True, 1970, discarded=1)
    assert rests == [1]


def test_where_the_clock_stays_low_it_is_accepted_after_many_rests_and_not_trusted() -> None:
    rests = []
    timing = sample_until(at_clocks(*[1500] * 17), CLOCKS, rest=rests.append)
    assert timing == Timing(1500.0, 0.0, 10, False, 1500, discarded=16)
    assert rests == list(range(1, 17))


def test_a_throttled_clock_is_never_trusted() -> None:
    timing = sample_until(at_clocks(*[1000] * 33), CLOCKS, rest=lambda discarded: None)
    assert (timing.converged, timing.discarded) == (False, 32)
    assert not sample_until(at_clocks(*[1000] * 33), Clocks(1000.0, 1980), rest=lambda discarded: None).converged


def test_a_clock_that_is_always_low_is_the_usual_one() -> None:
    assert sample_until(at_clocks(1500), Clocks(1510.0, 1980), rest=pytest.fail).converged


def test_throttled_samples_never_mix_with_good_ones() -> None:
    timing = sample_until(at_clocks(*[1000] * 17, 1970), CLOCKS, rest=lambda discarded: None)
    assert (timing.median_ns, timing.discarded) == (1970.0, 17)


def test_a_batch_that_was_queued_too_late_is_taken_again_at_once() -> None:
    batches = iter([Batch([2000.0] * 10, 700, late=True), Batch([1000.0] * 10, 1970)])
    timing = sample_until(lambda count: next(batches), CLOCKS, rest=pytest.fail)
    assert timing == Timing(1000.0, 0.0, 10, True, 1970, discarded=1)


def test_where_every_batch_is_late_the_timing_is_not_trusted() -> None:
    timing = sample_until(lambda count: Batch([1000.0] * count, 1970, late=True), CLOCKS, rest=pytest.fail)
    assert (timing.converged, timing.discarded) == (False, 32)


@pytest.mark.parametrize(
    ("launch_ns", "bytes_each", "expected"),
    [
        (2_000, 10_000, (150, 150, True, 10)),  # small: every launch on its own buffers, L2 flushed before each replay
        (20_000, 40_000_000, (16, 8, True, 10)),  # the rotation passes six times L2, in whole rounds
        (6_000_000, 300_000_000, (1, 1, False, 10)),  # one launch passes six times L2
        (600_000, 40_000_000, (1, 1, True, 10)),
        (20_000, 15_000_000, (15, 15, True, 10)),
    ],
)
def test_a_replay_is_long_enough_and_cold(launch_ns, bytes_each, expected) -> None:
    assert plan_launches(launch_ns, bytes_each, L2, "cold") == expected


def test_a_hot_replay_stays_on_one_set_of_buffers() -> None:
    assert plan_launches(2_000, 40_000_000, L2, "hot") == (1500, 1, False, 10)


def test_long_launches_are_taken_in_small_batches() -> None:
    assert plan_launches(30e6, 400_000_000, L2, "cold").batch == 6
    assert plan_launches(2e9, 400_000_000, L2, "cold").batch == 3
