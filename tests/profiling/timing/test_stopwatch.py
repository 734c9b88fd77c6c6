from gac.profiling.timing.stopwatch import Lead


def test_a_late_batch_doubles_the_lead_and_others_shorten_it_slowly_within_bounds() -> None:
    lead = Lead()
    first = lead.cycles
    lead.learn(late=True)
    assert lead.cycles == 2 * first
    lead.learn(late=False)
    assert 1.9 * first < lead.cycles < 2 * first
    for late, least, most in ((False, 1, first), (True, first, 100_000_000)):
        for _ in range(1000):
            lead.learn(late)
        assert least <= lead.cycles < most
