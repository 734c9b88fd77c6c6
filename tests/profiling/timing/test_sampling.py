import numpy as np
import pytest

from gac.profiling.timing.sampling import Batch, Clocks, Timing, plan_launches, sample_until

L2 = 50_000_000
CLOCKS = Clocks(1960.0, 1980)


def at_clocks(*clocks: int):
    """Batches at these clocks, one after the other; the samples at 1980 MHz say 1980 ns, and so on."""
    remaining = iter(clocks)

    def sampler(count: int) -> Batch:
        clock = next(remaining)
        return Batch([float(clock)] * count, clock)

    return sampler


@pytest.mark.parametrize(
    ("spread", "converged", "fewest", "most"), [(0.001, True, 10, 10), (0.03, True, 11, 59), (0.5, False, 60, 60)]
)
def test_samples_are_taken_until_the_median_is_known(spread, converged, fewest, most) -> None:
    random, taken = np.random.default_rng(0), []

    def sampler(count: int) -> Batch:
        taken.append(count)
        return Batch(list(1000 * (1 + spread * random.standard_normal(count))), 1970)

    timing = sample_until(sampler, CLOCKS, rest=pytest.fail)
    assert timing.converged is converged
    assert fewest <= timing.samples == sum(taken) <= most
    assert timing.median_ns == pytest.approx(1000, rel=2 * spread)


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


@pytest.mark.parametrize(
    ("clocks", "usual", "converged", "discarded"),
    [
        ((1500, 1970), 1960, True, 1),
        ((1500,) * 17, 1960, False, 16),  # it stays low: accepted, and not trusted
        ((1500,), 1510, True, 0),  # it is always low
        ((1000,) * 33, 1960, False, 32),  # throttled: never trusted
        ((1000,) * 33, 1000, False, 32),
        ((*(1000,) * 17, 1970), 1960, True, 17),  # throttled samples never mix with good ones
    ],
)
def test_a_batch_at_a_low_clock_is_discarded_and_taken_again_after_a_rest(clocks, usual, converged, discarded) -> None:
    rests = []
    timing = sample_until(at_clocks(*clocks), Clocks(usual, 1980), rest=rests.append)
    assert timing == Timing(clocks[-1], 0.0, 10, converged, clocks[-1], discarded)
    assert rests == list(range(1, discarded + 1))


def test_a_batch_that_was_queued_too_late_is_taken_again_at_once() -> None:
    batches = iter([Batch([2000.0] * 10, 700, late=True), Batch([1000.0] * 10, 1970)])
    timing = sample_until(lambda count: next(batches), CLOCKS, rest=pytest.fail)
    assert timing == Timing(1000.0, 0.0, 10, True, 1970, discarded=1)


@pytest.mark.parametrize(
    ("launch_ns", "bytes_each", "expected"),
    [
        (2_000, 10_000, (150, 150, True, 10)),  # small: every launch on its own buffers, L2 flushed before each replay
        (20_000, 40_000_000, (16, 8, True, 10)),  # the rotation passes six times L2, in whole rounds
        (6_000_000, 300_000_000, (1, 1, False, 10)),  # one launch passes six times L2
        (600_000, 40_000_000, (1, 1, True, 10)),
        (20_000, 15_000_000, (15, 15, True, 10)),
        (30e6, 400_000_000, (1, 1, False, 6)),  # long launches are taken in small batches
        (2e9, 400_000_000, (1, 1, False, 3)),
    ],
)
def test_a_replay_is_long_enough_and_cold(launch_ns, bytes_each, expected) -> None:
    assert plan_launches(launch_ns, bytes_each, L2, "cold") == expected
