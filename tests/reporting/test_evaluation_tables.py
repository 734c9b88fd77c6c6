"""Evaluated and timed models side by side, and that they fit."""

from dataclasses import replace

from rendering import shown

from gac.evaluation.bench import Result
from gac.evaluation.latency import Spread, Timed
from gac.evaluation.results import Divergence, Evaluated, Evaluation, OnText, Perplexity, TaskScore
from gac.reporting.evaluation import latency_table, perplexity_table, task_table, timed_table

PROTOCOL = "wiki-sample, 32 windows x 1024 from token 204800, non-overlapping, no BOS"


def measured(name: str, perplexity: float, parameters: int = 134_515_008, **more: object) -> Evaluated:
    result = Perplexity(perplexity, 32736, PROTOCOL, "float32")
    return Evaluated(name, parameters, "float32", result, **more)  # type: ignore[arg-type]


def score(metric: str, value: float, stderr: float | None = 0.05, items: int = 40, shots: int | None = 0) -> TaskScore:
    return TaskScore("piqa", metric, value, stderr, items, 40, shots, "1.0", "lm-eval 0.4.13", "float32")


def test_predictions_and_divergences_stand_beside_the_measured_change() -> None:
    divergence = Divergence(0.2345, 0.8125, 32736, PROTOCOL, "float32", "float32")
    small = measured("small", 25.0, 113_281_344, divergence=divergence, predicted=0.25)
    smaller = measured("[bold]er", 40.0, 90_000_000)
    heading, _, *lines = shown(perplexity_table(Evaluation((small, smaller), against=measured("smollm2", 20.0))))
    assert [heading, *lines] == [
        "parameters dtype perplexity ratio ln ratio KL top-1",
        "smollm2 134,515,008 float32 20.000 1 0",
        "small 113,281,344 float32 25.000 1.2500 0.2231 0.2345 81.2%",
        "predicted by its plan 25.681 1.2840 0.2500",
        "[bold]er 90,000,000 float32 40.000 2.0000 0.6931",
        PROTOCOL,
        "32,736 tokens predicted",
        "KL: of the model from smollm2, mean nats a token; top-1: tokens where both agree on the likeliest",
    ]


def test_every_text_has_a_row() -> None:
    first, second = (
        Perplexity(value, 100, f"{name}, no BOS", "float32", name) for value, name in ((20, "a"), (30, "b"))
    )
    dense = Evaluated("dense", 10, "float32", first, also=(OnText(second),))
    divergence = Divergence(0.5, 0.5, 100, "b, no BOS", "float32", "float32")
    more = OnText(replace(second, value=60.0), divergence)
    small = Evaluated("small", 8, "float32", replace(first, value=25.0), divergence, predicted=0.25, also=(more,))
    assert shown(perplexity_table(Evaluation((small,), dense)))[2:] == [
        "dense 10 float32",
        "on a 20.000 1 0",
        "on b 30.000 1 0",
        "small 8 float32",
        "on a 25.000 1.2500 0.2231 0.5000 50.0%",
        "predicted by its plan 25.681 1.2840 0.2500",
        "on b 60.000 2.0000 0.6931 0.5000 50.0%",
        "predicted by its plan 38.521 1.2840 0.2500",
        "a, no BOS",
        "100 tokens predicted",
        "b, no BOS",
        "100 tokens predicted",
        "KL: of the model from dense, mean nats a token; top-1: tokens where both agree on the likeliest",
    ]


def test_scores_of_two_models_in_one_table() -> None:
    dense = Evaluated("smollm2", 10, "float32", scores=(score("acc", 0.75), score("acc_norm", 0.5, None)))
    small = Evaluated("small", 8, "float32", scores=(score("acc", 0.5), score("acc_norm", 0.25, None)))
    heading, _, *lines = shown(task_table(Evaluation((small,), dense)))
    assert [heading, *lines] == [
        "task metric shots smollm2 small",
        "piqa acc 0 0.7500 ± 0.0500 0.5000 ± 0.0500",
        "piqa acc_norm 0 0.5000 0.2500",
        "40 items of piqa 1.0; by lm-eval 0.4.13; ±: standard error",
    ]
    partial = Evaluated("smollm2", 10, "float32", scores=(score("acc", 0.75, items=8, shots=None),))
    assert shown(task_table(Evaluation((partial,))))[2:] == [
        "piqa acc 0.7500 ± 0.0500",
        "the first 8 of 40 items of piqa 1.0; by lm-eval 0.4.13; ±: standard error",
    ]


def timed(name: str, ms: float) -> Timed:
    return Timed(name, "prefill:1x1024", Spread(1e6 * ms, 1e4 * ms, 7), 1024e3 / ms, 16_060_000_000)


def test_every_version_beside_the_dense_model() -> None:
    dense, rest = Spread(25_000_000.0, 50_000.0, 7), Spread(5_000_000.0, 10_000.0, 7)
    results = [
        Result(1000, 0.0, timed("dense, fused", 25.0), dense, dense, rest, 8, 25e6, 25e6),
        Result(850, 0.1575, timed("unaligned", 100.0), dense, dense, rest, 8),
        Result(791, 0.1575, timed("GAC", 20.0), dense, dense, rest, 8, 20.4e6, 20.8e6),
    ]
    heading, _, *rows = shown(latency_table(results, 1000))
    assert [heading, *rows[:3]] == [
        "prefill:1x1024 kept loss ms IQR over dense predicted tokens/s GB",
        "dense, fused 1.0000 0.0000 25.000 1.0% 1.000x +0.0% 40,960 16.06",
        "unaligned 0.8500 0.1575 100.000 1.0% 0.250x 10,240 16.06",
        "GAC 0.7910 0.1575 20.000 1.0% 1.250x +2.0% 51,200 16.06",
    ]
    lines = shown(timed_table([timed("dense", 25.0), timed("small", 20.0)]))
    assert lines[2:4] == ["dense 25.000 1.0% 1.000x 40,960 16.06", "small 20.000 1.0% 1.250x 51,200 16.06"]
