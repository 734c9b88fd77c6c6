from collections.abc import Mapping

import pytest

from gac.core.errors import ProfileError
from gac.lab.mechanisms import Explanation, Finding, explain
from gac.profiling.operators import OPERATORS
from gac.profiling.table import Profile
from gac.schemes import SCHEMES

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
    assert (tier.cost.basis, tier.cost.slowdown, tier.cost.against) == ("measured", 5.25, 1024)
    assert tier.cost.words == "5.25x the latency of 1024 (low_rank bf16 m=1024 k=4096 n=4096, r)"


def test_the_summary_is_one_sentence(profile) -> None:
    summary = explain("low_rank", 1022, profile).summary
    assert summary.startswith(
        "low_rank r=1022 on NVIDIA Test GPU takes 82.0 us, 2.56x as long as 1024 (alignment tier: "
        "cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_64x3_tn_align2 (sm80, align2, grid 32x8x1, "
    )
    assert summary.endswith(
        "); breaks 7 of 9 rules (cuBLAS alignment tier, vectorised access, Tensor Core tile, L2 sector, cp.async, TMA "
        "alignment, WGMMA tile); the nearest that break none: 1008 and 1024."
    )


def test_a_dim_that_was_not_measured_costs_what_its_alignment_class_does(profile) -> None:
    result = explain("low_rank", 1021, profile)
    assert (result.latency_ns, result.ran, result.collapse) == (None, (), None)
    cost = result.broken[0].cost
    assert (cost.basis, cost.against) == ("alignment class", None)
    assert cost.slowdown == pytest.approx(168 / 32)
    assert cost.words.startswith("5.25x, the median of the odd dims over the aligned dims they pad to")
    assert "was not measured; breaks 7 of 9 rules" in result.summary


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
    assert "vectorised access" in names
    assert not {"cuBLAS alignment tier", "cuBLAS heuristic", "TMA alignment", "WGMMA tile", "FP8 packing"} & names
    assert finding(result, "vectorised access").detail == "rows of 2046 bytes, which start at multiples of 2 bytes"


OPERATOR, KERNEL, GROUPS = "scheme operator", "scheme kernel", "scheme groups"
PLAIN = "plain PyTorch unpacks it for every product"
NEEDS = "needs rows and columns that are multiples of 16, and no batched GEMM"


def scheme_findings(
    operator: str, dim: int, dtype: str, axis: str | None = None, fixed: Mapping[str, int] | None = None
) -> dict[str, Finding]:
    """The findings that are the scheme's own, by their rule."""
    findings = explain(operator, dim, None, axis, fixed, dtype).findings
    return {finding.rule.name: finding for finding in findings if finding.rule.name in (OPERATOR, KERNEL, GROUPS)}


@pytest.mark.parametrize("dtype", ["fp8_dynamic", "w8a8"])
@pytest.mark.parametrize(("axis", "dim", "nearest"), [("n", 1000, (992, 1008)), ("k", 4088, (4080, 4096))])
def test_a_dim_without_an_operator_names_what_the_scheme_needs(dtype, axis, dim, nearest) -> None:
    result = scheme_findings("linear", dim, dtype, axis)[OPERATOR]
    assert (result.holds, (result.below, result.above)) == (False, nearest)
    name = "fp8" if dtype == "fp8_dynamic" else dtype
    assert result.detail == f"scheme {name} {NEEDS}: {axis} = {dim}"
    assert result.cost.words.startswith("no latency, and no plan that has it")
    assert scheme_findings("linear", 1008, dtype, axis)[OPERATOR].holds is True


@pytest.mark.parametrize(
    ("dtype", "dim", "reason"),
    [
        ("w4a16", 4008, "a weight has 4008 columns, no multiple of 32"),
        ("w4a16:96", 4032, "groups have 96 columns, no power of two from 64 on"),
        ("w4a16:32", 4096, "groups have 32 columns, no power of two from 64 on"),
        ("w8a8", 65552, "a weight has 65552 columns, not 1 to 65536"),
    ],
)
def test_columns_that_the_kernels_do_not_read_have_the_storages_reason(dtype, dim, reason) -> None:
    result = scheme_findings("linear", dim, dtype, "k")[KERNEL]
    assert (result.holds, result.detail) == (False, f"{reason}: {PLAIN}")


def test_the_last_group_is_ragged_where_the_kernels_read_the_matrix_all_the_same() -> None:
    result = scheme_findings("linear", 4000, "w4a16", "k")
    assert result[KERNEL].holds is True
    groups = result[GROUPS]
    assert (groups.holds, groups.below, groups.above) == (False, 3968, 4096)
    assert groups.detail == "4000 columns in groups of 128: the last has 32"
    assert scheme_findings("linear", 96, "w4a16", "k")[GROUPS].holds is True  # a single group
    assert set(scheme_findings("linear", 4000, "w8a16", "k")) == {KERNEL}  # a scale for each row


def test_rules_hold_where_the_schemes_and_operators_say_so() -> None:
    """The rules ask what runs and what measures ask: no list of their own."""
    linear = OPERATORS.get("linear")
    for scheme in SCHEMES:
        if scheme.storage is None:
            continue
        for k in (1, 32, 100, 128, 4000, 4096):
            result = scheme_findings("linear", k, scheme.dtype, "k", {"m": 1, "n": 4096})
            refused = linear.refusal({"m": 1, "k": k, "n": 4096}, scheme.dtype)
            assert (OPERATOR in result and not result[OPERATOR].holds) == (refused is not None)
            assert result[KERNEL].holds == (scheme.kernel_unsupported_reason(4096, k) is None)
            assert (GROUPS in result and not result[GROUPS].holds) == bool(scheme.ragged(k))
