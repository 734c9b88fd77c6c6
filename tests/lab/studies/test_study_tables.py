"""What single studies print, on machines whose figures are known."""

from collections.abc import Callable, Mapping
from dataclasses import replace

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
    """One by one, heads of different dims take as long as ``mixed`` says of their rows."""

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


SAID: Mapping[str, tuple[str, Rule, str, str]] = {
    "its classes": ("gemm-k", hopper, "other", ": odd K 2.73x, K % 4 == 2 1.91x, K % 8 == 4 1.91x"),
    "slower multiples of 8": ("sdpa-dense", hopper, "held", "slower than the next one: 104, 120"),
    "what is as fast": ("sdpa-backends", hopper, "other", "96 104 112 120 128 and as flash at 107"),
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
    "a switch that costs nothing": ("gemm-m", takes(lambda axes: 0.02, halves), "did not hold", ""),
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
    "a missing template": ("fa-templates", hopper, "other", ": no step past 160."),
    "misaligned flash beside the published median": ("fa-templates", a100, "held", "as long as 112 (A100: 1.44x)"),
    "steps of templates": (
        "fa-templates",
        a100,
        "held",
        "1.35x past 64, 1.21x past 96, 1.28x past 128, 1.10x past 160.",
    ),
    "up to which batch the fused kernel wins": (
        "int4-regimes",
        lambda point: (flat(point)[0] / (3 if point.operation.operator == "int4_linear" else 1), "one_kernel"),
        "other",
        "Differs on this GPU: the fused kernel beats the GEMM up to batch 32 on mlp_gate_up (RTX 4070: up to batch "
        "1), up to batch 32 on attn_q_o (RTX 4070: at no batch).",
    ),
    "a win within noise": ("int4-regimes", tie, "did not hold", "attn_q_o at batch 1 1.02x, edge 1.03x"),
    "slow attention alone": ("head-dim-132", slower(lambda axes: 5 if axes.get("d") == 132 else 1), "other", ""),
    "heads that cost only at many rows": ("heterogeneous-heads", heads(lambda m: 1.0 if m == 1 else 4.0), "other", ""),
    "heads one by one": (
        "heterogeneous-heads",
        a100,
        "held",
        "Holds on this GPU: one by one, heads of 114 to 125 dims take 1.33x to 1.33x as long as heads all of 128 and "
        "1.33x to 1.33x as long as heads all of 120.",
    ),
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
    "a tier without a loss at 8": ("tensor-core", slower(lambda axes: 2.3 if axes["k"] % 8 else 1), "other", ""),
    "a gemv whose n costs as much as k up to noise": ("gemv", gemv(1.14), "held", ""),
    "a gemv whose n costs more": ("gemv", gemv(1.17), "other", ""),
    "which kernels serve which dims": (
        "kernel-tiers",
        hopper,
        "other",
        "Differs on this GPU: K and N: % 8 == 0 by nvjet sm90 align8, % 2 == 0 by cutlass sm80 align2, odd by cutlass "
        "sm75 align1.",
    ),
    "an example beside the published one": (
        "gemm-k",
        a100,
        "held",
        "Holds on this GPU: K that are no multiple of 8 take 1.78x as long as the next multiple; 107 takes 1.78x as "
        "long as 112 (A100: 1.78x).",
    ),
    "a refused backend": (
        "sdpa-backends",
        a100,
        "held",
        "refused: sdpa_efficient fp16 b=4 h=32 kv=32 s=2048 t=2048 d=107: sdpa_efficient does not take d = 107",
    ),
    "what kernel switches cost": (
        "gemm-m",
        a100,
        "held",
        "Holds on this GPU: of 1 kernel switches between M 1024 and 2049, 1 raise the latency by more than 5 %, 1 by "
        "at least 25 %, 1 of them for good; the steepest is 1.30x at M 1728 to 1729 (M 1728 to 1729: 1.30x here, about "
        "1.30x on the A100).",
    ),
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


@pytest.mark.parametrize(("name", "rule", "verdict", "text"), SAID.values(), ids=SAID)
def test_what_a_study_says(name: str, rule: Rule, verdict: str, text: str) -> None:
    result = judged(name, rule)
    assert result.verdict == verdict
    assert text in "\n".join((result.sentence, *result.notes))


WON, THIRD = pytest.approx(1.78), pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("name", "rule", "begins", "rest"),
    [
        ("gemm-k", a100, (107,), (0.089, WON, 0.089)),
        ("sdpa-backends", a100, (107, "mem_efficient"), ("refused", "refused")),
        ("gemm-m", a100, ("1728 to 1729",), (1.3, 1.3, ..., ..., "switch, ~30 %")),
        ("gemm-m", bad_at_1600, ("1593 to 1600",), (pytest.approx(1.4), 1.0, ..., ..., None)),
        ("gemm-m", jump_at_the_first, ("1024 to 1025",), (1.5, None, ..., ..., None)),
        ("padding-rescue", a100, ("GEMM K", 107, 112), (0.089, pytest.approx(0.05), WON, 0.089, 0.05, WON)),
        ("kernel-tiers", hopper, ("K", "dim odd"), ("cutlass sm75 align1", 100.0, ...)),
        ("kernel-tiers", hopper, ("K", "dim % 8 == 0"), ("nvjet sm90 align8", 100.0, "cuBLAS native sm80")),
        ("fa-templates", a100, ("104 to 128", ..., ...), ("128: 128x64", "128x64", "128x64", "1.47")),
        ("head-dim-132", a100, ("layer", ..., ..., ...), (370.0, 219.0)),
        ("l2-sector", a100, ("GEMM 4096 x 4096 x K", "K % 16 == 0"), (..., ..., 0, ..., ...)),
        ("l2-sector", a100, ("GEMM 4096 x 4096 x K", "K % 16 == 8"), (..., ..., pytest.approx(6.5, abs=1.5), ..., ...)),
        ("sdpa-bandwidth", lambda _: (1.529, "flash"), (112,), (pytest.approx(153.6, abs=0.05), ..., 153.6, ...)),
        ("heterogeneous-heads", a100, (8, 1, "one by one", "114 to 125"), (1600.0, THIRD, THIRD, 1.6)),
        ("heterogeneous-heads", heads(lambda m: 8.0, alike=8.0), (8, 1, "bucketed", ...), (1000.0, None, None, 1.0)),
    ],
)
def test_a_row_sets_figures_beside_the_published_ones(name: str, rule: Rule, begins, rest) -> None:
    wanted = [(place, cell) for place, cell in enumerate((*begins, *rest)) if cell is not ...]
    known = [(place, cell) for place, cell in enumerate(begins) if cell is not ...]
    row = next(row for row in judged(name, rule).rows if all(row[place] == cell for place, cell in known))
    assert len(row) == len(begins) + len(rest)
    assert [(place, row[place]) for place, _ in wanted] == wanted


def test_the_loss_at_odd_k_says_where_kernels_are_not_recorded() -> None:
    machine = Machine(slower(odd))
    result = STUDIES.get("vector-width").judge(lambda point: replace(machine(point), launches=()))
    assert "odd K (two-byte loads, and kernels not recorded) lose 67 %" in result.sentence
