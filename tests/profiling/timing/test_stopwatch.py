from gac.profiling.timing.stopwatch import Lead


def test_a_late_batch_doubles_the_lead_and_others_shorten_it_slowly() -> None:
    lead = Lead()
    first = lead.cycles
    lead.learn(late=True)
    assert lead.cycles == 2 * first
    lead.learn(late=False)
    assert 1.9 * first < lead.cycles < 2 * first


def test_the_lead_has_bounds() -> None:
    lead = Lead()
    for _ in range(100):
        lead.learn(late=False)
    shortest = lead.cycles
    for _ in range(100):
        lead.learn(late=True)
    assert 0 < shortest < lead.cycles < 100_000_000
