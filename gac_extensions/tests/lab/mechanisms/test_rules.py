from dataclasses import replace
from itertools import product

import pytest

from gac.profiling.operators import OPERATORS
from gac.profiling.records import Launch
from gac_extensions.lab.mechanisms.rules import CHECKS, RULES, Setting, rules_for

NAMED = {rule.name: rule for rule in RULES}


def setting(operator: str, axis: str, dtype: str = "bf16", capability: str = "9.0") -> Setting:
    return Setting(operator, axis, dtype, capability, {"8.0": 163, "9.0": 227}.get(capability, 99) * 1024)


def broken(dim: int, where: Setting) -> set[str]:
    return {rule.name for rule in rules_for(where) if rule.check.judge(dim, where)[0] is False}


ROW_RULES = {"vectorised access", "L2 sector", "cp.async", "Tensor Core tile", "TMA alignment", "WGMMA tile"}
TEMPLATE, PADDING = "FlashAttention-2 template", "FlashAttention-2 padding waste"
BUDGET, BACKEND, TIER = "shared-memory tile budget", "SDPA backend selection", "cuBLAS alignment tier"


@pytest.mark.parametrize(
    ("operator", "axis", "dim", "expected"),
    [
        ("sdpa", "d", 107, ROW_RULES | {TEMPLATE} | {BACKEND, PADDING}),
        ("sdpa", "d", 112, {TEMPLATE}),
        ("sdpa", "d", 104, {TEMPLATE} | {PADDING, "L2 sector", "Tensor Core tile"}),
        ("sdpa", "d", 128, set()),
        ("low_rank", "r", 1023, ROW_RULES | {TIER}),
        ("low_rank", "r", 1016, {"L2 sector", "Tensor Core tile"}),
        ("low_rank", "r", 1024, set()),
        ("linear", "k", 106, ROW_RULES - {"WGMMA tile"} | {TIER}),
        # math attention computes in float32 without Tensor Cores
        ("sdpa_math", "d", 104, set()),
        ("sdpa_math", "d", 100, {"L2 sector"}),
        ("sdpa_math", "d", 102, {TIER, "vectorised access", "L2 sector", "cp.async"}),
    ],
)
def test_rules_that_a_dim_breaks_on_an_h100(operator, axis, dim, expected) -> None:
    assert broken(dim, setting(operator, axis)) == expected


def test_fp8_needs_multiples_of_16() -> None:
    where = setting("linear", "n", "fp8")
    assert {"FP8 packing", TIER, "TMA alignment"} <= broken(1000, where)
    assert "FP8 packing" not in broken(1008, where)
    assert "FP8 packing" not in {rule.name for rule in rules_for(setting("linear", "n"))}


def test_a_rule_holds_on_the_gpus_that_impose_it() -> None:
    names = {
        capability: broken(1023, setting("low_rank", "r", capability=capability))
        for capability in ("8.0", "9.0", "10.0", "7.0")
    }
    assert names["9.0"] - names["8.0"] == {"TMA alignment", "WGMMA tile"}
    assert names["9.0"] - names["10.0"] == {"WGMMA tile"}
    assert names["8.0"] - names["7.0"] == {"cp.async", "Tensor Core tile"}
    packing = [NAMED["FP8 packing"].holds_on(capability) for capability in ("8.6", "8.9", "9.0", "12.0")]
    assert packing == [False, True, True, True]


FLASH = "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<192, 128, 64, 8, false>>"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1"
MATH = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3"


def recorded(name: str) -> Setting:
    return replace(setting("sdpa", "d"), launches=(Launch(name, (8, 1, 32), (256, 1, 1), 98304),))


@pytest.mark.parametrize("rule", [TEMPLATE, PADDING, BUDGET])
def test_rules_of_flash_say_nothing_where_another_backend_served(rule) -> None:
    assert NAMED[rule].check.judge(104, recorded(CUDNN)) == (None, "cuDNN served it")
    assert NAMED[rule].check.judge(104, recorded(MATH)) == (None, "the math backend served it")


REBUILT = "no multiple of 8: PyTorch rebuilds the keys and values of all tokens in every step"
RETIRED = "older releases have a template for 160, newer ones serve it with 192; the kernel's name tells"


@pytest.mark.parametrize(
    ("rule", "dim", "where", "detail"),
    [
        (TIER, 107, setting("linear", "k"), "rows of 214 bytes, which start at multiples of 2 bytes"),
        ("cp.async", 106, setting("linear", "k"), "rows of 212 bytes, which start at multiples of 4 bytes"),
        ("WGMMA tile", 1023, setting("linear", "n"), "1023 % 8 = 7"),
        ("latent kernel", 64, setting("latent_attention", "k"), "64 = 8 x 8: read 16 bytes at a time"),
        ("latent kernel", 60, setting("latent_attention_int8", "v"), f"latents have rank 60, {REBUILT}"),
        (TEMPLATE, 160, setting("sdpa", "d"), RETIRED),
        (TEMPLATE, 160, recorded(FLASH), "the template for 192 serves 160: 16.7% of its work is padding"),
        (BUDGET, 160, recorded(FLASH), "128x64 tile (recorded): Q, K and V take 96 of 227 KiB"),
        (BUDGET, 257, setting("sdpa", "d"), "257 is larger than the largest template, 256"),
    ],
)
def test_the_numbers_behind_a_rule(rule, dim, where, detail) -> None:
    assert NAMED[rule].check.judge(dim, where)[1] == detail


def test_every_rule_has_a_level_a_source_and_a_published_cost() -> None:
    assert len(NAMED) == len(RULES) == len(CHECKS) == 19
    assert {rule.level for rule in RULES} == {"framework", "library", "hardware", "memory"}
    for rule in RULES:
        assert rule.sources
        assert rule.published
        assert all(source.author and source.title and source.section for source in rule.sources)
        assert all(source.url.startswith("https://") for source in rule.sources)


@pytest.mark.parametrize("operator", OPERATORS.names)
def test_every_operator_has_a_compressed_axis_and_rules_that_answer(operator) -> None:
    known = OPERATORS.get(operator)
    assert {known.compressed_axis, *known.gemm_sides} <= set(known.axes)
    for axis, dim in product(known.axes, (1, 107, 4096)):
        where = setting(operator, axis, known.dtypes[0])
        for rule in rules_for(where):
            holds, detail = rule.check.judge(dim, where)
            assert holds in (True, False, None)
            assert detail


@pytest.mark.parametrize("operator", ["copy", "int4_linear", "all_reduce", "round_to_fp8", "sdpa", "latent_attention"])
def test_rules_of_cublas_bind_only_what_runs_in_cublas(operator) -> None:
    rules = rules_for(setting(operator, OPERATORS.get(operator).axes[0]))
    assert "cuBLAS heuristic" not in {rule.name for rule in rules}
