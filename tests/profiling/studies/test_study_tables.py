"""What single studies print, on machines whose figures are known."""

import pytest

from gac.profiling.records import Measurement, Point
from gac.profiling.studies import STUDIES, StudyResult
from tests.profiling.studies.machines import Answer, Machine, a100, flat, flops, hopper


def judged(name: str, machine: object = a100) -> StudyResult:
    return STUDIES[name].judge(Machine(machine))  # type: ignore[arg-type]


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
    assert "mem_efficient or cudnn at 96 104 112 120 128, flash at 107" in judged("sdpa-backends", hopper).sentence


def test_published_bandwidth_follows_from_the_published_latency() -> None:
    def only_112(point: Point) -> Answer:
        return 1.529, "flash"

    row = row_of(STUDIES["sdpa-bandwidth"].judge(Machine(only_112)), 112)
    assert round(float(str(row[1])), 1) == row[3] == 153.6


def test_kernel_switches_are_listed_with_what_they_cost() -> None:
    result = judged("gemm-m")
    assert row_of(result, "1728 to 1729")[1] == 1.3
    assert row_of(result, "1728 to 1729")[4] == "switch, ~30 %"
    assert result.sentence == (
        "Holds on this GPU: 1 kernel switch between M 1024 and 2049, the worst raises the latency 1.30x at M 1728 to "
        "1729 (A100: about 1.30x at M 1728 to 1729)."
    )


def test_a_jump_without_a_switch_is_no_switch() -> None:
    def wave(point: Point) -> Answer:
        return (0.02 if point.operation.axes["m"] <= 1728 else 0.04), "one_kernel"

    assert judged("gemm-m", wave).verdict == "did not hold"


def test_a_cheap_switch_is_another_form() -> None:
    def cheap(point: Point) -> Answer:
        return 0.02, "one" if point.operation.axes["m"] <= 1728 else "two"

    assert judged("gemm-m", cheap).verdict == "other"


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
        "Differs on this GPU: breaking only the sector rule costs a GEMM 1.80x, misaligned K 1.80x."
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
        "nvjet_sm90_hsh_128x256_64x4_2x1_v_bz_coopA_TNN",
        "cuBLAS native sm80",
    )


def test_templates_that_ran_stand_beside_the_tile_model() -> None:
    result = judged("fa-templates")
    assert row_of(result, "104 to 128")[3:] == ("128: 128x64", "128x64", "128x64", "1.47")
    assert result.sentence.endswith("latency rises 1.35x past 64, 1.21x past 96, 1.28x past 128, 1.10x past 160.")


def test_a_missing_template_is_another_form() -> None:
    assert judged("fa-templates", hopper).verdict == "other"


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


def test_heads_one_by_one_are_compared_with_padding() -> None:
    result = judged("heterogeneous-heads")
    assert result.rows[0] == (8, 1, "separate", 1600.0, 1.6)
    assert result.verdict == "held"


def test_heads_that_are_slow_one_by_one_only_at_one_row_are_another_form() -> None:
    def launches(point: Point) -> Answer:
        slow = point.operation.operator == "batched_gemm_separate" and point.operation.axes["m"] == 1
        return flat(point)[0] * (8 if slow else 1), "one_kernel"

    assert judged("heterogeneous-heads", launches).verdict == "other"


def test_a_tier_without_a_loss_at_8_is_another_form() -> None:
    def only_odd(point: Point) -> Answer:
        return flat(point)[0] * (2.3 if point.operation.axes["k"] % 8 else 1), "one_kernel"

    assert judged("tensor-core", only_odd).verdict == "other"


def test_measurements_are_all_that_is_asked_for() -> None:
    asked: list[Point] = []

    def find(point: Point) -> Measurement:
        asked.append(point)
        return Machine(a100)(point)

    STUDIES["gemv"].judge(find)
    assert asked == list(STUDIES["gemv"].points())
