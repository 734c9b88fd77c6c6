"""Measured latencies as people read them."""

from rendering import shown

from gac.evaluation.bench import Result
from gac.evaluation.latency import Spread, Timed
from gac.reporting.latency_tables import latency_markdown, latency_table, timed_table

DENSE = Spread(25_000_000.0, 50_000.0, 7)
REST = Spread(5_000_000.0, 10_000.0, 7)


def timed(name: str, ms: float) -> Timed:
    return Timed(name, "prefill:1x1024", Spread(1e6 * ms, 1e4 * ms, 7), 1024e3 / ms, 16_060_000_000)


RESULTS = [
    Result(1000, 0.0, timed("dense, fused", 25.0), DENSE, DENSE, REST, 25e6, 25e6),
    Result(850, 0.1575, timed("unaligned", 100.0), DENSE, DENSE, REST),
    Result(791, 0.1575, timed("GAC", 20.0), DENSE, DENSE, REST, 20.4e6, 20.8e6),
]


def test_every_contestant_beside_the_dense_model() -> None:
    heading, _, *rows = shown(latency_table(RESULTS, 1000))
    assert [heading, *rows[:3]] == [
        "prefill:1x1024 kept loss ms IQR over dense predicted tokens/s GB",
        "dense, fused 1.0000 0.0000 25.000 1.0% 1.000x +0.0% 40,960 16.06",
        "unaligned 0.8500 0.1575 100.000 1.0% 0.250x 10,240 16.06",
        "GAC 0.7910 0.1575 20.000 1.0% 1.250x +2.0% 51,200 16.06",
    ]


def test_the_same_as_markdown() -> None:
    assert list(latency_markdown(RESULTS, 1000))[2:] == [
        "| dense, fused | 1.0000 | 0.0000 | 25.000 | 1.0% | 1.000x | +0.0% | 40,960 | 16.06 |",
        "| unaligned | 0.8500 | 0.1575 | 100.000 | 1.0% | 0.250x |  | 10,240 | 16.06 |",
        "| GAC | 0.7910 | 0.1575 | 20.000 | 1.0% | 1.250x | +2.0% | 51,200 | 16.06 |",
    ]


def test_models_beside_the_first_one() -> None:
    lines = shown(timed_table([timed("dense", 25.0), timed("small", 20.0)]))
    assert lines[2:4] == ["dense 25.000 1.0% 1.000x 40,960 16.06", "small 20.000 1.0% 1.250x 51,200 16.06"]
