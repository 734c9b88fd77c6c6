import pytest

from gac.core.errors import ProfileError
from gac.lab.mechanisms import Explanation, Finding, explain
from gac.profiling.table import Profile

NVJET = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNN"
ALIGN2 = "cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_64x3_tn_align2>"
ALIGN1 = "cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>"
SMALL = "nvjet_sm90_tst_64x64_64x13_1x4_h_bz_TNT"
FIXED = {"m": 1024, "k": 4096, "n": 4096}


def finding(found: Explanation, name: str) -> Finding:
    return next(one for one in found.findings if one.rule.name == name)


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
    found = explain("low_rank", 1023, profile)
    assert (found.axis, found.latency_ns, dict(found.fixed)) == ("r", 168_000.0, FIXED)
    assert (found.collapse.rescue, found.collapse.slowdown) == (1024, 5.25)
    assert found.collapse.cause.kind == "alignment tier"
    assert [(one.kernel.tier, one.launch.grid, one.waves.tiles, one.waves.count) for one in found.ran] == [
        (1, (32, 8, 1), 64, 1),
        (1, (2, 66, 1), 256, 2),
    ]
    tier = finding(found, "cuBLAS alignment tier")
    assert (tier.holds, tier.below, tier.above) == (False, 1016, 1024)
    assert (tier.cost.basis, tier.cost.slowdown, tier.cost.against) == ("measured", 5.25, 1024)
    assert tier.cost.words == "5.25x the latency of 1024 (low_rank bf16 m=1024 k=4096 n=4096, r)"


def test_the_summary_is_one_sentence(profile) -> None:
    assert explain("low_rank", 1022, profile).summary == (
        "low_rank r=1022 on NVIDIA Test GPU takes 82.0 us, 2.56x as long as 1024 (alignment tier: the first GEMM ran "
        "cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_64x3_tn_align2 (sm80, operands aligned to 2 elements) "
        f"instead of {NVJET} (sm90, operands aligned to 8 elements); so did the second GEMM); breaks 7 of 9 rules "
        "(cuBLAS alignment tier, vectorised access, Tensor Core tile, L2 sector, cp.async, TMA alignment, WGMMA tile); "
        "the nearest that break none: 1008 and 1024."
    )


def test_a_dim_that_was_not_measured_costs_what_its_alignment_class_does(profile) -> None:
    found = explain("low_rank", 1021, profile)
    assert (found.latency_ns, found.ran, found.collapse) == (None, (), None)
    cost = found.broken[0].cost
    assert (cost.basis, cost.against) == ("alignment class", None)
    assert cost.slowdown == pytest.approx(168 / 32)
    assert cost.words.startswith("5.25x, the median of the odd dims over the aligned dims they pad to")
    assert "was not measured; breaks 7 of 9 rules" in found.summary


def test_an_aligned_rank_keeps_its_rules(profile) -> None:
    found = explain("low_rank", 1024, profile)
    assert (found.collapse, found.broken) == (None, ())
    assert found.summary == (
        "low_rank r=1024 on NVIDIA Test GPU takes 32.0 us, and no larger measured dim is faster; breaks no rule."
    )
    assert (
        finding(found, "CTA wave quantisation").detail
        == "32 tiles in 1 wave, the last 24% full; then 128 tiles in 1 wave, the last 97% full"
    )


def test_a_recorded_kernel_switch_breaks_the_heuristics_rule(profile) -> None:
    found = explain("low_rank", 1040, profile)
    assert found.collapse.cause.kind == "kernel switch"
    (one,) = found.broken
    assert (one.rule.name, one.above, one.cost.slowdown) == ("cuBLAS heuristic", 1048, 1.25)


def test_other_axes_or_a_sweep_that_alone_has_the_dim_are_preferred_to_the_largest(profile) -> None:
    assert explain("low_rank", 1004, profile, fixed=FIXED | {"m": 1}).latency_ns == 4000.0
    assert dict(explain("low_rank", 1001, profile).fixed)["m"] == 1


def test_where_no_larger_dim_keeps_every_rule_only_the_smaller_one_is_named(profile) -> None:
    assert explain("sdpa_flash", 304, profile).summary == (
        "sdpa_flash d=304 on NVIDIA Test GPU was not measured; breaks 3 of 10 rules (FlashAttention-2 template, "
        "FlashAttention-2 padding waste, shared-memory tile budget); the nearest that break none: 256."
    )


def test_a_cost_is_measured_against_a_dim_within_reach_only(profile_file) -> None:
    for rank, ns in ((1023, 9000.0), (2047, 9900.0), (2048, 3000.0)):
        profile_file.row("low_rank", {"m": 1024, "k": 4096, "r": rank, "n": 4096}, ns)
    sparse = Profile.load(profile_file.write())
    assert {one.cost.basis for one in explain("low_rank", 1023, sparse, fixed=FIXED).broken} == {"published"}
    assert {one.cost.against for one in explain("low_rank", 2047, sparse, fixed=FIXED).broken} == {2048}


@pytest.fixture(scope="module")
def h100() -> Profile:
    return Profile.load("nvidia-h100-80gb-hbm3")


TEMPLATE, BUDGET = "FlashAttention-2 template", "shared-memory tile budget"


def test_what_flash_served_is_compared_with_the_dim_that_cudnn_serves(h100) -> None:
    template = finding(explain("sdpa", 107, h100), TEMPLATE)
    assert (template.below, template.above, template.cost.against) == (104, 112, 112)


@pytest.mark.parametrize(
    ("dim", "rule", "detail"),
    [
        (64, BUDGET, "128x128 tile of 4 warps (recorded): "),
        (160, BUDGET, "128x64 tile of 8 warps (recorded): "),
        (256, BUDGET, "64x64 tile of 4 warps (recorded): "),
        (104, TEMPLATE, "; it ran with is_even_K false"),
        (128, TEMPLATE, "; it ran with is_even_K true"),
        (128, "CTA wave quantisation", "256 tiles in at least 1 wave"),  # waves are only bounded
    ],
)
def test_the_tile_the_checks_and_the_waves_are_those_that_were_recorded(dim, rule, detail, h100) -> None:
    assert detail in finding(explain("sdpa_flash", dim, h100), rule).detail


def test_without_a_profile_costs_are_published_ones() -> None:
    found = explain("sdpa", 107)
    assert (found.gpu, found.fixed, found.latency_ns) == (None, (), None)
    backend = finding(found, "SDPA backend selection")
    assert (backend.below, backend.above, backend.cost.basis) == (104, 112, "published")
    assert backend.detail == "107 is not a multiple of 8: only flash and math take it, flash after copies padded to 112"
    assert "A100" in backend.cost.words
    assert found.summary.endswith("the nearest that break none: 96 and 128.")


def test_broken_rules_come_first(profile) -> None:
    holds = [one.holds for one in explain("sdpa", 120).findings]
    assert holds == sorted(holds, key=[False, None, True].index)
    assert set(holds) == {False, None, True}


def test_an_operator_that_the_profile_lacks_has_the_rules_of_its_gpu(profile) -> None:
    found = explain("linear", 106, profile)
    assert (found.compute_capability, found.fixed, found.latency_ns) == ("9.0", (), None)
    assert {one.cost.basis for one in found.broken} == {"published"}


def test_a_copy_is_under_no_rule() -> None:
    assert explain("copy", 33).summary == "copy n=33 is under no rule."


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"axis": "d"}, "axis 'd' of low_rank; expected one of m, k, r, n. Name one of the operator's axes."),
        ({"dim": 0}, "dim 0 of low_rank; expected a size of at least 1. Correct the dim."),
        ({"dtype": "fp4"}, "dtype 'fp4' of low_rank; expected one of bf16.* Name one of the operator's dtypes."),
        (
            {"fixed": {"m": 1}},
            "low_rank along r with m fixed; expected sizes for m, k, n. "
            "Give every other axis a size, or none for the largest sweep.",
        ),
    ],
)
def test_what_cannot_be_explained_is_refused(asked, message) -> None:
    with pytest.raises(ProfileError, match=message):
        explain(**({"operator": "low_rank", "dim": 1023} | asked))


# --- weights in storages ---


def test_a_scheme_has_its_record_and_the_rules_of_rows_but_none_of_cublas(profile_file) -> None:
    profile_file.kernel("a_kernel_of_ours", 128, 0)
    for rank in range(1000, 1033):
        shape = {"m": 1024, "k": 4096, "r": rank, "n": 4096}
        ns = 20_000.0 if rank % 8 == 0 else 50_000.0
        profile_file.row("low_rank", shape, ns, dtype="w4a16", launches=[[0, 32, 8, 1]])
    found = explain("low_rank", 1023, Profile.load(profile_file.write()), dtype="w4a16")
    assert (found.dtype, found.latency_ns, found.collapse.rescue) == ("w4a16", 50_000.0, 1024)
    assert [one.launch.name for one in found.ran] == ["a_kernel_of_ours"]
    names = {one.rule.name for one in found.findings}
    assert "vectorised access" in names
    assert not {"cuBLAS alignment tier", "cuBLAS heuristic", "TMA alignment", "WGMMA tile", "FP8 packing"} & names
    assert finding(found, "vectorised access").detail == "rows of 2046 bytes: loads of 2 bytes"


def test_a_dtype_that_is_no_scheme_is_refused() -> None:
    expected = "dtype 'w5a16' of low_rank; expected one of bf16, fp16, or that of a scheme with a storage. Name"
    with pytest.raises(ProfileError, match=expected):
        explain("low_rank", 8, dtype="w5a16")
    with pytest.raises(ProfileError, match=r"dtype 'w4a16' of sdpa; expected one of bf16, fp16. Name"):
        explain("sdpa", 8, dtype="w4a16")
