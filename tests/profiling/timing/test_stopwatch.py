from gac.profiling.timing.stopwatch import next_lead


def test_a_late_batch_doubles_the_lead_and_others_shorten_it_slowly_within_bounds() -> None:
    assert next_lead(400_000, late=True) == 800_000
    assert 380_000 < next_lead(400_000, late=False) < 400_000
    assert next_lead(1, late=False) == 200_000
    assert next_lead(10**9, late=True) == next_lead(10**12, late=True) < 100_000_000
