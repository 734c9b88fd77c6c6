"""Results of single studies on machines whose figures are known."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from gac.profiling.records import Point
from gac_extensions.lab.studies import STUDIES, StudyResult, published
from gac_extensions.lab.studies.readings import percent, times
from gac_extensions.lab.studies.records import Band
from gac_extensions.tests.lab.studies.machines import Answer, Machine, a100, flat

Rule = Callable[[Point], Answer]


def judged(name: str, machine: Rule = a100) -> StudyResult:
    return STUDIES.get(name).judge(Machine(machine))


def takes(ms: Callable[[Mapping[str, int]], float]) -> Rule:
    """Every operator takes as long as its axes say."""
    return lambda point: (ms(point.operation.axes), "one_kernel")


def slower(factor: Callable[[Mapping[str, int]], float]) -> Rule:
    """So many times the latency of the flat machine."""
    return lambda point: (flat(point)[0] * factor(point.operation.axes), "one_kernel")


def odd(axes: Mapping[str, int]) -> float:
    return 3 if axes.get("k", 2) % 2 else 1


def bad_at_1600(point: Point) -> Answer:
    m = point.operation.axes["m"]
    return (0.028, "bad") if m == 1600 else (0.02, "one" if m <= 1728 else "two")


SENTENCES: Mapping[str, tuple[str, Rule, str, str]] = {
    "sectors that cost as much as misalignment": (
        "l2-sector",
        takes(lambda axes: 0.05 if axes["k"] % 16 == 0 else 0.09),
        "other",
        "Differs on this GPU: breaking only the sector rule costs a GEMM 1.80x, misaligned K 1.80x: sectors are "
        "100 % of the cost; bandwidth goes from 713 to 396 GB/s (A100: 209 to 215).",
    ),
    "up to which batch the fused kernel wins": (
        "int4-regimes",
        lambda point: (flat(point)[0] / (3 if point.operation.operator == "int4_linear" else 1), "one_kernel"),
        "other",
        "Differs on this GPU: the fused kernel beats the GEMM up to batch 32 on mlp_gate_up (RTX 4070: up to batch "
        "1), up to batch 32 on attn_q_o (RTX 4070: at no batch).",
    ),
    "the same kernel at odd k": (
        "vector-width",
        slower(odd),
        "held",
        "Holds on this GPU: odd K (two-byte loads, and the same kernel: one_kernel) lose 67 % of a GEMM's "
        "throughput (A100: 50 %) and 67 % of a GEMV's bandwidth (the same kernel: one_kernel).",
    ),
    "a share that does not read as its threshold": (
        "tensor-core",
        slower(lambda axes: 1 / (0.3 if axes["k"] % 2 else 0.901 if axes["k"] % 16 == 8 else 1.0)),
        "other",
        "(9.9 % lost, A100: 16 %)",
    ),
    "a single bad m is no step": (
        "gemm-m",
        bad_at_1600,
        "other",
        "Differs on this GPU: of 3 kernel switches between M 1024 and 2049, 1 raise the latency by more than 5 %, 1 by "
        "at least 25 %, 0 of them for good; the steepest is 1.40x at M 1593 to 1600, M 1600 alone (M 1728 to 1729: "
        "1.00x here, about 1.30x on the A100).",
    ),
}


@pytest.mark.parametrize(("name", "rule", "verdict", "text"), SENTENCES.values(), ids=SENTENCES)
def test_verdict_and_sentence(name: str, rule: Rule, verdict: str, text: str) -> None:
    result = judged(name, rule)
    assert result.verdict == verdict
    assert text in "\n".join((result.sentence, *result.notes))


EXPECTED = json.loads(Path(__file__).with_name("expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", EXPECTED)
def test_results_on_the_published_machine(name: str) -> None:
    """Sentences, notes and tables are those of ``expected.json``, figures to nine digits."""
    result = judged(name)
    rows = [[float(f"{cell:.9g}") if isinstance(cell, float) else cell for cell in row] for row in result.rows]
    actual = {"verdict": result.verdict, "sentence": result.sentence, "notes": list(result.notes[1:]), "rows": rows}
    assert actual == EXPECTED[name]


def test_kernels_that_were_not_recorded() -> None:
    machine = Machine(slower(odd))
    result = STUDIES.get("vector-width").judge(lambda point: replace(machine(point), launches=()))
    assert "odd K (two-byte loads, and kernels not recorded) lose 67 %" in result.sentence


@pytest.mark.parametrize("table", [name for name in published.TABLES if name != "about"])
def test_a_table_names_its_content_and_source_and_is_complete(table: str) -> None:
    entry = published.TABLES[table]
    assert entry["shows"]
    assert entry["source"]
    assert {len(row) for row in entry["rows"]} == {len(entry["columns"])}


def test_a_factor_is_graded_against_the_published_band() -> None:
    graded = [Band(1.25, 2.0, 1.05).finding(factor, ()).verdict for factor in (1.04, 1.1, 1.25, 2.0, 2.1)]
    assert graded == ["did not hold", "other", "held", "held", "other"]


def test_a_figure_has_digits_enough_to_differ_from_its_edges_and_is_never_minus_zero() -> None:
    assert [percent(share) for share in (0.584, -1e-9, -0.03)] == ["58 %", "0 %", "-3 %"]
    assert [percent(share, 0.10) for share in (0.09869, 0.0999, 0.10, 0.12)] == ["9.9 %", "9.99 %", "10 %", "12 %"]
    assert [times(factor, 1.25, 2.5) for factor in (2.42, 2.4996, 2.5)] == ["2.42x", "2.4996x", "2.50x"]
