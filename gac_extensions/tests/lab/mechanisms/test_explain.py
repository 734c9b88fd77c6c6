from collections.abc import Mapping
from itertools import product

import pytest

from gac.core.errors import ProfileError
from gac.profiling.operators import OPERATORS
from gac.profiling.table import Profile
from gac.schemes import SCHEMES
from gac_extensions.lab.mechanisms import Cost, Explanation, Finding, explain

NVJET = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNN"
ALIGN2 = "cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_64x3_tn_align2>"
ALIGN1 = "cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>"
SMALL = "nvjet_sm90_tst_64x64_64x13_1x4_h_bz_TNT"
FIXED = {"m": 1024, "k": 4096, "n": 4096}


def finding(explanation: Explanation, name: str) -> Finding:
    return next(finding for finding in explanation.findings if finding.rule.name == name)


@pytest.fixture
def profile(profile_file) -> Profile:
    """Ranks 960 to 1088 by alignment: 32, 82 and 168 us; 1040 has a kernel of its own. And a short sweep at one row."""
    for name in (NVJET, ALIGN2, ALIGN1, SMALL):
        profile_file.kernel(name, 384, 200_000)
    for rank in range(960, 1089):
        if rank in (1001, 1021):
            continue
        kernel = 0 if rank % 8 == 0 else 1 if rank % 2 == 0 else 2
        ns = (32_000.0, 82_000.0, 168_000.0)[kernel]
        if rank == 1040:
            kernel, ns = 3, 40_000.0
        launches = [[kernel, 32, 8, 1], [kernel, 2, 66, 1]]
        shape = {"m": 1024, "k": 4096, "r": rank, "n": 4096}
        profile_file.row("low_rank", shape, ns, launches=launches)
    profile_file.ranks(dict.fromkeys(range(1000, 1009), 4000.0), m=1)
    return Profile.load(profile_file.write())


def test_a_collapsed_rank_with_its_rescue_cause_kernels_and_measured_cost(profile) -> None:
    result = explain("low_rank", 1023, profile)
    assert (result.axis, result.latency_ns, dict(result.fixed)) == ("r", 168_000.0, FIXED)
    assert (result.collapse.rescue, result.collapse.slowdown) == (1024, 5.25)
    assert result.collapse.cause.kind == "alignment tier"
    assert [(run.kernel.tier, run.launch.grid, run.waves.tiles, run.waves.count) for run in result.ran] == [
        (1, (32, 8, 1), 64, 1),
        (1, (2, 66, 1), 256, 2),
    ]
    tier = finding(result, "cuBLAS alignment tier")
    assert (tier.holds, tier.below, tier.above) == (False, 1016, 1024)
    words = "5.25x the latency of 1024 (low_rank bf16 m=1024 k=4096 n=4096, r)"
    assert tier.cost == Cost("measured", words, 5.25, 1024)
    assert result.summary.startswith(
        "low_rank r=1023 on NVIDIA Test GPU takes 168.0 us, 5.25x as long as 1024 (alignment tier: cutlass_75_"
    )
    assert result.summary.endswith(
        "); breaks 7 of 9 rules (cuBLAS alignment tier, vectorised access, Tensor Core tile, L2 sector, cp.async, TMA "
        "alignment, WGMMA tile); the nearest that break none: 1008 and 1024."
    )


def test_a_dim_that_was_not_measured_costs_what_its_alignment_class_does(profile) -> None:
    result = explain("low_rank", 1021, profile)
    assert (result.latency_ns, result.ran, result.collapse) == (None, (), None)
    cost = result.broken[0].cost
    assert (cost.basis, cost.against, cost.slowdown) == ("alignment class", None, pytest.approx(168 / 32))
    assert cost.words.startswith("5.25x, the median of the odd dims over the aligned dims they pad to")
    assert "was not measured: interpolated, 168.0 us; breaks 7 of 9 rules" in result.summary


def test_a_shape_without_a_latency_is_unknown(profile) -> None:
    for dim, fixed, gap in (
        (4096, None, "and this alignment in the table; a model needs 32"),
        (1024, {"m": 3, "k": 4096, "n": 4096}, "0 shapes with m=3 and this alignment in the table; a model needs 32"),
    ):
        said = explain("low_rank", dim, profile, fixed=fixed).summary
        assert "was not measured, and its latency is unknown: " in said
        assert f"{gap}; " in said
    for fixed in (None, {"m": 16, "k": 4096, "n": 14336}):
        said = explain("served_low_rank", 1024, profile, fixed=fixed).summary
        assert "the table has no served_low_rank in bf16; the shipped table nvidia-h200-vllm, of NVIDIA H200, " in said
    said = explain("served_low_rank", 1024, profile, fixed={"m": 3, "k": 4096, "n": 14336}).summary
    assert "the table has no served_low_rank in bf16; breaks" in said


def test_a_shape_that_the_table_lacks_is_modelled() -> None:
    fixed = {"m": 1024, "k": 4096, "n": 4000}
    assert "was not measured: modelled, " in explain("low_rank", 1024, "nvidia-h100-80gb-hbm3", fixed=fixed).summary


def test_a_recorded_kernel_switch_breaks_the_heuristics_rule(profile) -> None:
    result = explain("low_rank", 1040, profile)
    assert result.collapse.cause.kind == "kernel switch"
    (broken,) = result.broken
    assert (broken.rule.name, broken.above, broken.cost.slowdown) == ("cuBLAS heuristic", 1048, 1.25)


def test_other_axes_or_a_sweep_that_alone_has_the_dim_are_preferred_to_the_largest(profile) -> None:
    assert explain("low_rank", 1004, profile, fixed=FIXED | {"m": 1}).latency_ns == 4000.0
    assert dict(explain("low_rank", 1001, profile).fixed)["m"] == 1


@pytest.fixture(scope="module")
def h100() -> Profile:
    return Profile.load("nvidia-h100-80gb-hbm3")


TEMPLATE, BUDGET = "FlashAttention-2 template", "shared-memory tile budget"


@pytest.mark.parametrize(
    ("dim", "rule", "detail"),
    [
        (160, BUDGET, "128x64 tile (recorded): "),
        (104, TEMPLATE, "; it ran with is_even_K false"),
        (128, TEMPLATE, "; it ran with is_even_K true"),
        (128, "CTA wave quantisation", "256 tiles in at least 1 wave"),  # waves are only bounded
    ],
)
def test_the_tile_the_checks_and_the_waves_are_those_that_were_recorded(dim, rule, detail, h100) -> None:
    assert detail in finding(explain("sdpa_flash", dim, h100), rule).detail


def test_without_a_profile_costs_are_published_ones() -> None:
    result = explain("sdpa", 107)
    assert (result.gpu, result.fixed, result.latency_ns) == (None, (), None)
    backend = finding(result, "SDPA backend selection")
    assert (backend.below, backend.above, backend.cost.basis) == (104, 112, "published")
    assert backend.detail == "107 % 8 = 3"
    assert "A100" in backend.cost.words
    assert result.summary.endswith("the nearest that break none: 96 and 128.")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"axis": "d"}, "axis 'd' of low_rank"),
        ({"dim": 0}, "dim 0 of low_rank"),
        ({"dtype": "fp4"}, "dtype 'fp4' of low_rank"),
        ({"fixed": {"m": 1}}, "low_rank along r with m fixed"),
    ],
)
def test_wrong_arguments_are_refused(arguments, problem) -> None:
    with pytest.raises(ProfileError) as caught:
        explain(**({"operator": "low_rank", "dim": 1023} | arguments))
    assert caught.value.given == problem


# --- weights in storages ---


def test_a_scheme_has_its_record_and_the_rules_of_rows_but_none_of_cublas(profile_file) -> None:
    profile_file.kernel("a_kernel_of_ours", 128, 0)
    for rank in range(1000, 1033):
        shape = {"m": 1024, "k": 4096, "r": rank, "n": 4096}
        ns = 20_000.0 if rank % 8 == 0 else 50_000.0
        profile_file.row("low_rank", shape, ns, dtype="w4a16", launches=[[0, 32, 8, 1]])
    result = explain("low_rank", 1023, Profile.load(profile_file.write()), dtype="w4a16")
    assert (result.dtype, result.latency_ns, result.collapse.rescue) == ("w4a16", 50_000.0, 1024)
    assert [run.launch.name for run in result.ran] == ["a_kernel_of_ours"]
    names = {finding.rule.name for finding in result.findings}
    assert not {"cuBLAS alignment tier", "cuBLAS heuristic", "TMA alignment", "WGMMA tile", "FP8 packing"} & names
    assert finding(result, "vectorised access").detail == "rows of 2046 bytes, which start at multiples of 2 bytes"


OPERATOR, KERNEL, GROUPS = "scheme operator", "scheme kernel", "scheme groups"
EIGHT_BITS = "needs rows and columns that are multiples of 16, and no batched GEMM"


def scheme_findings(dim: int, dtype: str, axis: str, fixed: Mapping[str, int] | None = None) -> dict[str, Finding]:
    """The findings of a linear layer that are the scheme's own, by their rule."""
    findings = explain("linear", dim, None, axis, fixed, dtype).findings
    return {finding.rule.name: finding for finding in findings if finding.rule.name in (OPERATOR, KERNEL, GROUPS)}


@pytest.mark.parametrize(
    ("dtype", "axis", "dim", "rule", "nearest", "detail"),
    [
        ("fp8_dynamic", "n", 1000, OPERATOR, (992, 1008), f"scheme fp8 {EIGHT_BITS}: n = 1000"),
        ("w8a8", "k", 4088, OPERATOR, (4080, 4096), f"scheme w8a8 {EIGHT_BITS}: k = 4088"),
        ("w4a16", "k", 4008, KERNEL, (4000, 4032), "a weight has 4008 columns, no multiple of 32: plain PyTorch"),
        ("w4a16:96", "k", 4032, KERNEL, (None, None), "groups have 96 columns, no power of two from 64 on: plain"),
        ("w8a8", "k", 65552, KERNEL, (65536, None), "a weight has 65552 columns, not 1 to 65536: plain PyTorch"),
        ("w4a16", "k", 4000, GROUPS, (3968, 4096), "4000 columns in groups of 128: the last has 32"),
    ],
)
def test_a_broken_rule_of_a_scheme_has_its_reason_and_the_nearest_dims(dtype, axis, dim, rule, nearest, detail) -> None:
    result = scheme_findings(dim, dtype, axis)[rule]
    assert (result.holds, (result.below, result.above)) == (False, nearest)
    assert result.detail.startswith(detail)
    assert rule != OPERATOR or result.cost.words.startswith("no latency, and no plan that has it")


def test_a_scale_for_each_row_makes_no_groups_and_a_single_group_is_whole() -> None:
    assert set(scheme_findings(4000, "w8a16", "k")) == {KERNEL}
    assert scheme_findings(96, "w4a16", "k")[GROUPS].holds is True


def test_rules_hold_where_the_schemes_and_operators_say_so() -> None:
    """The rules ask what runs and what measures ask: no list of their own."""
    stored = [scheme for scheme in SCHEMES if scheme.storage is not None]
    for scheme, k in product(stored, (1, 32, 100, 128, 4000, 4096)):
        result = scheme_findings(k, scheme.dtype, "k", {"m": 1, "n": 4096})
        refused = OPERATORS.get("linear").refusal({"m": 1, "k": k, "n": 4096}, scheme.dtype)
        assert (OPERATOR in result and not result[OPERATOR].holds) == (refused is not None)
        assert (KERNEL not in result or result[KERNEL].holds) == (scheme.kernel_unsupported_reason(4096, k) is None)
        assert (GROUPS in result and not result[GROUPS].holds) == bool(scheme.ragged(k))
