"""Results of single studies on machines whose figures are known."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from gac.lab.studies import STUDIES, StudyResult
from gac.profiling.records import Point
from tests.lab.studies.machines import ALIGN1, ALIGN8, Answer, Machine, a100, flat, hopper

Rule = Callable[[Point], Answer]


def judged(name: str, machine: object = a100) -> StudyResult:
    return STUDIES.get(name).judge(Machine(machine))  # type: ignore[arg-type]


def takes(ms: Callable[[Mapping[str, int]], float], kernel: Callable[[int], str] = lambda m: "one_kernel") -> Rule:
    """Every operator takes as long as its axes say; which kernel runs goes by its rows."""
    return lambda point: (ms(point.operation.axes), kernel(point.operation.axes.get("m", 0)))


def slower(factor: Callable[[Mapping[str, int]], float], kernel: Callable[[int], str] = lambda k: "one_kernel") -> Rule:
    """So many times the latency of the flat machine; which kernel runs goes by k."""
    return lambda point: (
        flat(point)[0] * factor(point.operation.axes),
        kernel(point.operation.axes.get("k", 2)),
    )


def heads(mixed: Callable[[int], float], alike: float = 1.0) -> Rule:
    """Heads of different dims take ``mixed`` of their rows, one by one."""

    def answer(point: Point) -> Answer:
        axes = point.operation.axes
        if point.operation.operator != "batched_gemm_separate":
            return 1.0, "one_kernel"
        return (mixed(axes["m"]) if axes["low"] < axes["high"] else alike), "one_kernel"

    return answer


def halves(m: int) -> str:
    return "one" if m <= 1728 else "two"


def odd(axes: Mapping[str, int]) -> float:
    return 3 if axes.get("k", 2) % 2 else 1


def gemv(n: float) -> Rule:
    return takes(lambda axes: 1.12 if axes["k"] % 8 else n if axes["n"] % 8 else 1.0)


def tie(point: Point) -> Answer:
    return (1 / 1.02 if point.operation.operator == "int4_linear" else 1.0), "one_kernel"


def bad_at_1600(point: Point) -> Answer:
    return (0.028, "bad") if point.operation.axes["m"] == 1600 else (0.02, halves(point.operation.axes["m"]))


def jump_at_the_first(point: Point) -> Answer:
    return (0.02, "one") if point.operation.axes["m"] <= 1024 else (0.03, "two")


SENTENCES: Mapping[str, tuple[str, Rule, str, str]] = {
    "a step beside a switch that costs nothing": (
        "gemm-m",
        takes(lambda axes: 0.02 if axes["m"] <= 1728 else 0.03, lambda m: "one" if m <= 1721 else "two"),
        "did not hold",
        "",
    ),
    "a jump without a switch": (
        "gemm-m",
        takes(lambda axes: 0.02 if axes["m"] <= 1728 else 0.04),
        "did not hold",
        "no kernel switch",
    ),
    "a small step": (
        "gemm-m",
        takes(lambda axes: 0.02 if axes["m"] <= 1728 else 0.0242, halves),
        "other",
        "close to the edge: the largest rise that stays 1.21x, edge 1.25x",
    ),
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
    "a win within noise": ("int4-regimes", tie, "did not hold", "attn_q_o at batch 1 1.02x, edge 1.03x"),
    "heads that cost only at many rows": ("heterogeneous-heads", heads(lambda m: 1.0 if m == 1 else 4.0), "other", ""),
    "what launching heads costs, which is not judged": (
        "heterogeneous-heads",
        heads(lambda m: 8.0, alike=8.0),
        "did not hold",
        "what launching heads one by one costs besides: heads all of 128 take 8.00x to 8.00x as long as heads "
        "padded to 128 in one launch",
    ),
    "another kernel at odd k": (
        "vector-width",
        slower(odd, lambda k: ALIGN1 if k % 2 else ALIGN8),
        "held",
        "odd K (two-byte loads, and another kernel: cutlass sm75 align1 instead of ",
    ),
    "the same kernel at odd k": (
        "vector-width",
        slower(odd),
        "held",
        "Holds on this GPU: odd K (two-byte loads, and the same kernel: one_kernel) lose 67 % of a GEMM's "
        "throughput (A100: 50 %) and 67 % of a GEMV's bandwidth (the same kernel: one_kernel).",
    ),
    "a factor beside its edge": (
        "gemm-k",
        takes(lambda axes: 2.42 if axes["k"] % 8 else 1.0),
        "held",
        "edge: 2.42x, edge 2.50x",
    ),
    "a share that does not read as its threshold": (
        "tensor-core",
        slower(lambda axes: 1 / (0.3 if axes["k"] % 2 else 0.901 if axes["k"] % 16 == 8 else 1.0)),
        "other",
        "(9.9 % lost, A100: 16 %)",
    ),
    "a gemv whose n costs more": ("gemv", gemv(1.17), "other", ""),
    "what the axis says of tokens kept": (
        "gemm-m",
        bad_at_1600,
        "other",
        "one past a multiple of 8 takes 1.00x as long as the next multiple; of 64 steps of 16 tokens, 1 are more than "
        "5 % slower than with 16 more",
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


@pytest.mark.parametrize(
    ("name", "rule", "begins", "rest"),
    [
        ("gemm-m", bad_at_1600, ("1593 to 1600",), (pytest.approx(1.4), 1.0, ..., ..., None)),
        ("gemm-m", jump_at_the_first, ("1024 to 1025",), (1.5, None, ..., ..., None)),
        ("sdpa-bandwidth", lambda _: (1.529, "flash"), (112,), (pytest.approx(153.6, abs=0.05), ..., 153.6, ...)),
        ("heterogeneous-heads", heads(lambda m: 8.0, alike=8.0), (8, 1, "bucketed", ...), (1000.0, None, None, 1.0)),
    ],
)
def test_rows_have_measured_and_published_figures(name: str, rule: Rule, begins, rest) -> None:
    wanted = [(place, cell) for place, cell in enumerate((*begins, *rest)) if cell is not ...]
    known = [(place, cell) for place, cell in enumerate(begins) if cell is not ...]
    row = next(row for row in judged(name, rule).rows if all(row[place] == cell for place, cell in known))
    assert len(row) == len(begins) + len(rest)
    assert [(place, row[place]) for place, _ in wanted] == wanted


EXPECTED = json.loads(Path(__file__).with_name("expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", EXPECTED)
def test_results_on_published_and_steeper_machines(name: str) -> None:
    """Sentences, notes and tables are those of ``expected.json``, figures to nine digits."""
    machine, study = name.split()
    result = judged(study, {"a100": a100, "hopper": hopper}[machine])
    rows = [[float(f"{cell:.9g}") if isinstance(cell, float) else cell for cell in row] for row in result.rows]
    actual = {"verdict": result.verdict, "sentence": result.sentence, "notes": list(result.notes[1:]), "rows": rows}
    assert actual == EXPECTED[name]


def test_kernels_that_were_not_recorded() -> None:
    machine = Machine(slower(odd))
    result = STUDIES.get("vector-width").judge(lambda point: replace(machine(point), launches=()))
    assert "odd K (two-byte loads, and kernels not recorded) lose 67 %" in result.sentence
