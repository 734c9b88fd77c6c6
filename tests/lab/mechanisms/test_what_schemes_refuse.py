"""What explanations and causes say of a scheme's own constraints, by what the scheme and its storage say."""

from collections.abc import Mapping

import pytest

from gac.lab.mechanisms import Finding, causes_of, explain
from gac.profiling.cliffs import find_cliffs
from gac.profiling.operators import OPERATORS
from gac.profiling.table import Profile
from gac.schemes import SCHEMES

OPERATOR, KERNEL, GROUPS = "scheme operator", "scheme kernel", "scheme groups"
PLAIN = "plain PyTorch unpacks it for every product"
NEEDS = "needs rows and columns that are multiples of 16, and no batched GEMM"


def told(
    operator: str, dim: int, dtype: str, axis: str | None = None, fixed: Mapping[str, int] | None = None
) -> dict[str, Finding]:
    """The findings that are the scheme's own, by their rule."""
    found = explain(operator, dim, None, axis, fixed, dtype).findings
    return {one.rule.name: one for one in found if one.rule.name in (OPERATOR, KERNEL, GROUPS)}


@pytest.mark.parametrize("dtype", ["fp8_dynamic", "w8a8"])
@pytest.mark.parametrize(("axis", "dim", "nearest"), [("n", 1000, (992, 1008)), ("k", 4088, (4080, 4096))])
def test_a_dim_without_an_operator_names_what_the_scheme_needs(dtype, axis, dim, nearest) -> None:
    found = told("linear", dim, dtype, axis)[OPERATOR]
    assert (found.holds, (found.below, found.above)) == (False, nearest)
    name = "fp8" if dtype == "fp8_dynamic" else dtype
    assert found.detail == f"scheme {name} {NEEDS}: {axis} = {dim}"
    assert found.cost.words.startswith("no latency, and no plan that has it")
    assert told("linear", 1008, dtype, axis)[OPERATOR].holds is True


def test_other_sizes_count_where_they_are_known() -> None:
    found = told("linear", 1008, "w8a8", "n", {"m": 1, "k": 1000})[OPERATOR]
    assert (found.holds, found.below, found.above) == (False, None, None)
    assert found.detail == f"scheme w8a8 {NEEDS}: k = 1000, n = 1008"
    assert told("batched_gemm", 1024, "w8a8")[OPERATOR].holds is False


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
    found = told("linear", dim, dtype, "k")[KERNEL]
    assert (found.holds, found.detail) == (False, f"{reason}: {PLAIN}")


@pytest.mark.parametrize("dtype", ["w8a16", "w4a16", "w4a16:64", "w3a16", "w2a16", "fp8_dynamic", "w8a8"])
def test_the_kernels_of_every_scheme_read_4096_columns(dtype) -> None:
    assert told("linear", 4096, dtype, "k")[KERNEL].holds is True


def test_the_last_group_is_ragged_where_the_kernels_read_the_matrix_all_the_same() -> None:
    found = told("linear", 4000, "w4a16", "k")
    assert found[KERNEL].holds is True
    groups = found[GROUPS]
    assert (groups.holds, groups.below, groups.above) == (False, 3968, 4096)
    assert groups.detail == "4000 columns in groups of 128: the last has 32"
    assert told("linear", 96, "w4a16", "k")[GROUPS].holds is True  # all in one group
    assert set(told("linear", 4000, "w8a16", "k")) == {KERNEL}  # a scale for each row


def test_a_rank_is_the_columns_of_the_second_factor() -> None:
    found = told("low_rank", 1000, "w4a16", fixed={"m": 1, "k": 4096, "n": 4096})
    assert found[KERNEL].detail.startswith("a weight has 1000 columns")
    assert found[GROUPS].detail == "4096 and 1000 columns in groups of 128: the last has 104"


def test_rows_alone_say_nothing_of_columns() -> None:
    assert set(told("linear", 1000, "w4a16", "n")) == set()
    assert set(told("linear", 1000, "w4a16", "n", {"m": 1, "k": 4000})) == {KERNEL, GROUPS}
    assert set(told("linear", 1001, "w4a16", "m")) == set()
    assert set(told("linear", 1000, "bf16", "k")) == set()


def test_rules_hold_where_the_schemes_and_operators_say_so() -> None:
    """The rules ask what runs and what measures ask: no list of their own."""
    linear = OPERATORS.get("linear")
    for scheme in SCHEMES:
        if scheme.storage is None:
            continue
        for k in (1, 32, 100, 128, 4000, 4096):
            found = told("linear", k, scheme.dtype, "k", {"m": 1, "n": 4096})
            refused = linear.refusal({"m": 1, "k": k, "n": 4096}, scheme.dtype)
            assert (OPERATOR in found and not found[OPERATOR].holds) == (refused is not None)
            assert found[KERNEL].holds == (scheme.kernel_unsupported_reason(4096, k) is None)
            assert (GROUPS in found and not found[GROUPS].holds) == bool(scheme.ragged(k))


# --- causes ---


@pytest.fixture
def sweep(profile_file):
    """Widths of w4a16: where kernels read no such columns, an unpacking and a GEMM run."""
    for name in ("vector", "unpack", "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNN"):
        profile_file.kernel(name, 128, 0)
    for k in range(4000, 4129, 8):
        read = k % 32 == 0
        launches = [[0, 32, 1, 1]] if read else [[1, 32, 1, 1], [2, 32, 1, 1]]
        ns = 10_000.0 if read else 300_000.0
        profile_file.row("linear", {"m": 1, "k": k, "n": 4096}, ns, dtype="w4a16", launches=launches)
    return Profile.load(profile_file.write()).rows_of("linear", {"m": 1, "n": 4096}, "k", "w4a16")


def test_a_collapse_where_no_kernel_reads_the_columns_is_told_so(sweep, header) -> None:
    cliffs = find_cliffs(sweep)
    causes = dict(zip(cliffs.collapsed.tolist(), causes_of(sweep, cliffs, header), strict=True))
    assert causes[4008].kind == "no kernel"
    assert causes[4008].evidence == f"a weight has 4008 columns, no multiple of 32: {PLAIN}"
    assert (causes[4008].slow, causes[4008].fast) == ("unpack", "vector")
    assert {cause.kind for cause in causes.values()} == {"no kernel"}
