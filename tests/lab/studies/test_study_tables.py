"""What single studies print, on machines whose figures are known."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from gac.errors import ProfileError
from gac.lab.studies import STUDIES, StudyResult
from gac.profiling.records import Measurement, Point
from tests.lab.studies.machines import ALIGN1, ALIGN8, NVJET, Answer, Machine, a100, flat, flops, hopper

Rule = Callable[[Point], Answer]


def judged(name: str, machine: object = a100) -> StudyResult:
    return STUDIES.get(name).judge(Machine(machine))  # type: ignore[arg-type]


def row_of(result: StudyResult, *begins: object) -> tuple[object, ...]:
    return next(row for row in result.rows if row[: len(begins)] == begins)


def test_gemm_k_sets_latencies_beside_the_published_ones() -> None:
    result = judged("gemm-k")
    assert [f"{column.heading} {column.unit}" for column in result.columns] == [
        "K ",
        "measured ms",
        "over next multiple of 8 x",
        "A100 ms",
    ]
    assert row_of(result, 107) == (107, 0.089, pytest.approx(1.78), 0.089)
    assert result.sentence == (
        "Holds on this GPU: K that are no multiple of 8 take 1.78x as long as the next multiple; 107 takes 1.78x as "
        "long as 112 (A100: 1.78x)."
    )


def test_a_larger_factor_than_published_is_another_form_and_its_classes_are_noted() -> None:
    result = judged("gemm-k", hopper)
    assert result.sentence.startswith("Differs on this GPU: K that are no multiple of 8 take 2.56x as long")
    assert result.notes[1] == "median over the next multiple of 8: odd K 2.73x, K % 4 == 2 1.91x, K % 8 == 4 1.91x"


def test_attention_names_multiples_of_8_that_are_slower_than_the_next() -> None:
    assert judged("sdpa-dense", hopper).notes[2] == "multiples of 8 that are slower than the next one: 104, 120"


def test_a_refused_backend_is_a_cell_and_a_note() -> None:
    result = judged("sdpa-backends")
    assert row_of(result, 107, "mem_efficient") == (107, "mem_efficient", "refused", "refused")
    assert "refused: sdpa_efficient fp16 b=4 h=32 kv=32 s=2048 t=2048 d=107: sdpa_efficient does not take d = 107" in (
        result.notes
    )


def test_the_automatic_choice_is_named_by_what_is_as_fast() -> None:
    assert (
        "mem_efficient or cudnn at 96 104 112 120 128 and as flash at 107" in judged("sdpa-backends", hopper).sentence
    )


def test_published_bandwidth_follows_from_the_published_latency() -> None:
    def only_112(point: Point) -> Answer:
        return 1.529, "flash"

    row = row_of(STUDIES.get("sdpa-bandwidth").judge(Machine(only_112)), 112)
    assert round(float(str(row[1])), 1) == row[3] == 153.6


def by_m(latency: Callable[[int], float], kernel: Callable[[int], str]) -> Rule:
    return lambda point: (latency(point.operation.axes["m"]), kernel(point.operation.axes["m"]))


def halves(m: int) -> str:
    return "one" if m <= 1728 else "two"


def test_kernel_switches_are_listed_with_what_they_cost() -> None:
    result = judged("gemm-m")
    assert row_of(result, "1728 to 1729")[1:3] == (1.3, 1.3)
    assert row_of(result, "1728 to 1729")[5] == "switch, ~30 %"
    assert result.sentence == (
        "Holds on this GPU: of 1 kernel switches between M 1024 and 2049, 1 raise the latency by more than 5 %, 1 by "
        "at least 25 %, 1 of them for good; the steepest is 1.30x at M 1728 to 1729 (M 1728 to 1729: 1.30x here, about "
        "1.30x on the A100)."
    )


def test_a_single_bad_m_is_no_step() -> None:
    result = judged("gemm-m", by_m(lambda m: 0.028 if m == 1600 else 0.02, lambda m: "bad" if m == 1600 else halves(m)))
    assert result.verdict == "other"
    assert result.sentence == (
        "Differs on this GPU: of 3 kernel switches between M 1024 and 2049, 1 raise the latency by more than 5 %, 1 by "
        "at least 25 %, 0 of them for good; the steepest is 1.40x at M 1593 to 1600, M 1600 alone (M 1728 to 1729: "
        "1.00x here, about 1.30x on the A100)."
    )
    assert row_of(result, "1593 to 1600")[1:3] == (pytest.approx(1.4), 1.0)


def test_a_step_beside_a_switch_that_costs_nothing_is_not_its_own() -> None:
    latency = by_m(lambda m: 0.02 if m <= 1728 else 0.03, lambda m: "one" if m <= 1721 else "two")
    assert judged("gemm-m", latency).verdict == "did not hold"


def test_a_step_at_the_first_m_is_not_said_to_stay() -> None:
    result = judged("gemm-m", by_m(lambda m: 0.02 if m <= 1024 else 0.03, lambda m: "one" if m <= 1024 else "two"))
    assert result.verdict == "other"
    assert row_of(result, "1024 to 1025")[1:3] == (1.5, None)


def test_a_jump_without_a_switch_is_no_switch() -> None:
    result = judged("gemm-m", by_m(lambda m: 0.02 if m <= 1728 else 0.04, lambda m: "one_kernel"))
    assert result.verdict == "did not hold"
    assert "no kernel switch between M 1024 and 2049" in result.sentence


def test_a_switch_that_costs_nothing_is_no_cliff() -> None:
    assert judged("gemm-m", by_m(lambda m: 0.02, halves)).verdict == "did not hold"


def test_a_small_step_is_another_form() -> None:
    result = judged("gemm-m", by_m(lambda m: 0.02 if m <= 1728 else 0.0242, halves))
    assert result.verdict == "other"
    assert result.notes[-1] == "close to the edge: the largest rise that stays 1.21x, edge 1.25x"


def test_padding_shows_what_was_won_here_and_there() -> None:
    row = row_of(judged("padding-rescue"), "GEMM K", 107, 112)
    won = pytest.approx(1.78)
    assert row == ("GEMM K", 107, 112, 0.089, pytest.approx(0.05), won, 0.089, 0.05, won)


def test_the_sector_rule_is_a_main_cause_where_it_costs_as_much_as_misalignment() -> None:
    def sectors(point: Point) -> Answer:
        return (0.05 if point.operation.axes["k"] % 16 == 0 else 0.09), "one_kernel"

    result = judged("l2-sector", sectors)
    assert result.verdict == "other"
    assert result.sentence == (
        "Differs on this GPU: breaking only the sector rule costs a GEMM 1.80x, misaligned K 1.80x: sectors are 100 % "
        "of the cost; bandwidth goes from 713 to 396 GB/s (A100: 209 to 215)."
    )


def test_bytes_fetched_in_vain_are_those_of_partial_sectors() -> None:
    result = judged("l2-sector")
    whole, half = (row_of(result, "GEMM 4096 x 4096 x K", name) for name in ("K % 16 == 0", "K % 16 == 8"))
    assert whole[4] == 0
    assert 5 < float(str(half[4])) < 8


def test_kernel_tiers_say_which_kernels_serve_which_dims() -> None:
    result = judged("kernel-tiers", hopper)
    assert row_of(result, "K", "dim odd")[2:4] == ("cutlass sm75 align1", 100.0)
    assert row_of(result, "K", "dim % 8 == 0")[2:] == (
        "nvjet sm90 align8",
        100.0,
        "cuBLAS native sm80",
    )
    assert result.sentence == (
        "Differs on this GPU: K and N: % 8 == 0 by nvjet sm90 align8, % 2 == 0 by cutlass sm80 align2, odd by cutlass "
        "sm75 align1."
    )
    assert f"kernels, for example: {NVJET}, " in result.notes[2]


def test_templates_that_ran_stand_beside_the_tile_model() -> None:
    result = judged("fa-templates")
    assert row_of(result, "104 to 128")[3:] == ("128: 128x64", "128x64", "128x64", "1.47")
    assert result.sentence.endswith("latency is 1.35x past 64, 1.21x past 96, 1.28x past 128, 1.10x past 160.")


def test_a_missing_template_is_another_form() -> None:
    result = judged("fa-templates", hopper)
    assert result.verdict == "other"
    assert result.sentence.endswith(": no step past 160.")


def test_misaligned_flash_is_compared_with_the_published_median() -> None:
    assert "as long as 112 (A100: 1.44x)" in judged("fa-templates").notes[2]


def test_int4_says_up_to_which_batch_the_fused_kernel_wins() -> None:
    def always(point: Point) -> Answer:
        return flat(point)[0] / (3 if point.operation.operator == "int4_linear" else 1), "one_kernel"

    result = judged("int4-regimes", always)
    assert result.verdict == "other"
    assert result.sentence == (
        "Differs on this GPU: the fused kernel beats the GEMM up to batch 32 on mlp_gate_up (RTX 4070: up to batch 1), "
        "up to batch 32 on attn_q_o (RTX 4070: at no batch)."
    )


def test_head_dim_132_sums_the_layer() -> None:
    result = judged("head-dim-132")
    assert [row[0] for row in result.rows] == ["attention", "qkv", "o", "mlp up", "mlp down", "layer"]
    assert row_of(result, "layer")[4:] == (370.0, 219.0)


def test_slow_attention_alone_is_another_form() -> None:
    def attention(point: Point) -> Answer:
        slow = point.operation.axes.get("d") == 132
        return flops(point) / 1e11 * (5 if slow else 1), "one_kernel"

    assert judged("head-dim-132", attention).verdict == "other"


def heads(mixed: Callable[[int], float], alike: float = 1.0, padded: float = 1.0) -> Rule:
    """One by one, heads of different dims take as long as ``mixed`` says of their rows."""

    def answer(point: Point) -> Answer:
        axes = point.operation.axes
        if point.operation.operator != "batched_gemm_separate":
            return padded, "one_kernel"
        return (mixed(axes["m"]) if axes["low"] < axes["high"] else alike), "one_kernel"

    return answer


def test_misaligned_heads_are_compared_with_aligned_heads_that_take_as_many_gemms() -> None:
    result = judged("heterogeneous-heads")
    third = pytest.approx(4 / 3)
    assert result.rows[0] == (8, 1, "one by one", "114 to 125", 1600.0, third, third, 1.6)
    assert result.verdict == "held"
    assert result.sentence == (
        "Holds on this GPU: one by one, heads of 114 to 125 dims take 1.33x to 1.33x as long as heads all of 128 and "
        "1.33x to 1.33x as long as heads all of 120."
    )


def test_what_launches_cost_is_told_but_not_judged() -> None:
    result = judged("heterogeneous-heads", heads(lambda m: 8.0, alike=8.0))
    assert result.verdict == "did not hold"
    assert row_of(result, 8, 1, "bucketed")[4:] == (1000.0, None, None, 1.0)
    assert result.notes[1] == (
        "what launching heads one by one costs besides: heads all of 128 take 8.00x to 8.00x as long as heads padded "
        "to 128 in one launch"
    )


def test_heads_whose_misalignment_costs_only_at_many_rows_are_another_form() -> None:
    assert judged("heterogeneous-heads", heads(lambda m: 1.0 if m == 1 else 4.0)).verdict == "other"


def test_heads_without_their_aligned_controls_are_not_judged() -> None:
    def find(point: Point) -> Measurement | None:
        axes = point.operation.axes
        return None if axes["low"] == axes["high"] else Machine(a100)(point)

    with pytest.raises(ProfileError) as caught:
        STUDIES.get("heterogeneous-heads").judge(find)
    assert caught.value.given == "8 of the 20 points of study heterogeneous-heads are not measured"


def odd_k(kernel: str) -> Rule:
    return lambda point: (flat(point)[0] * (3 if point.operation.axes.get("k", 2) % 2 else 1), kernel)


def test_the_loss_at_odd_k_names_the_kernels_that_changed() -> None:
    def served(point: Point) -> Answer:
        return odd_k(ALIGN1 if point.operation.axes.get("k", 2) % 2 else ALIGN8)(point)

    assert "odd K (two-byte loads, and another kernel: cutlass sm75 align1 instead of " in (
        judged("vector-width", served).sentence
    )


def test_the_loss_at_odd_k_says_where_one_kernel_serves_all() -> None:
    assert judged("vector-width", odd_k("one_kernel")).sentence == (
        "Holds on this GPU: odd K (two-byte loads, and the same kernel: one_kernel) lose 67 % of a GEMM's throughput "
        "(A100: 50 %) and 67 % of a GEMV's bandwidth (the same kernel: one_kernel)."
    )


def test_the_loss_at_odd_k_says_where_kernels_are_not_recorded() -> None:
    machine = Machine(odd_k("one_kernel"))
    result = STUDIES.get("vector-width").judge(lambda point: replace(machine(point), launches=()))
    assert "odd K (two-byte loads, and kernels not recorded) lose 67 %" in result.sentence


def test_a_factor_beside_its_edge_is_noted() -> None:
    def nearly(point: Point) -> Answer:
        return (2.42 if point.operation.axes["k"] % 8 else 1.0), "one_kernel"

    assert judged("gemm-k", nearly).notes[-1] == "close to the edge: 2.42x, edge 2.50x"
    assert not [note for note in judged("gemm-k").notes if note.startswith("close")]


def test_a_share_that_is_just_too_small_does_not_read_as_its_threshold() -> None:
    def nearly(point: Point) -> Answer:
        k = point.operation.axes["k"]
        return flat(point)[0] / (0.3 if k % 2 else 0.901 if k % 16 == 8 else 1.0), "one_kernel"

    result = judged("tensor-core", nearly)
    assert result.verdict == "other"
    assert "(9.9 % lost, A100: 16 %)" in result.sentence
    assert result.notes[-1] == "close to the edge: K % 16 == 8 loses 9.9 %, edge 10 %"


def gemv(k: float, n: float) -> Rule:
    return lambda point: (k if point.operation.axes["k"] % 8 else n if point.operation.axes["n"] % 8 else 1.0, "one")


def test_a_gemv_whose_n_costs_as_much_as_k_up_to_noise_holds() -> None:
    assert judged("gemv", gemv(1.12, 1.14)).verdict == "held"
    assert judged("gemv", gemv(1.12, 1.17)).verdict == "other"


def test_a_win_within_noise_is_no_win() -> None:
    def tie(point: Point) -> Answer:
        return (1 / 1.02 if point.operation.operator == "int4_linear" else 1.0), "one_kernel"

    result = judged("int4-regimes", tie)
    assert result.verdict == "did not hold"
    assert "close to the edge: attn_q_o at batch 1 1.02x, edge 1.03x" in result.notes


def test_a_tier_without_a_loss_at_8_is_another_form() -> None:
    def only_odd(point: Point) -> Answer:
        return flat(point)[0] * (2.3 if point.operation.axes["k"] % 8 else 1), "one_kernel"

    assert judged("tensor-core", only_odd).verdict == "other"


def test_measurements_are_all_that_is_asked_for() -> None:
    asked: list[Point] = []

    def find(point: Point) -> Measurement:
        asked.append(point)
        return Machine(a100)(point)

    STUDIES.get("gemv").judge(find)
    assert asked == list(STUDIES.get("gemv").points())
