"""Why a site is what it is: sentences from the plan's own alternatives, and from the latency table."""

from dataclasses import replace

import pytest

from gac.core.words import duration, nats, ranges
from gac.models.sites import Weight
from gac.plan.plan import Candidate, Limit, SiteChoice, WeightChoice
from gac.profiling.table import Profile
from gac.reporting.report.reasons import next_dims, reasons, trades
from gac.reporting.report.tables import about_dense, stayed_dense
from tests.allocation.small_problems import PREFILL, measured, profile
from tests.changed import changed_recipe, with_recipe
from tests.reporting.report_plans import by_rule, decided, renamed, rounded


def test_smaller_and_larger_are_weighed_at_the_plans_prices() -> None:
    plan = decided()
    (price,) = plan.certificate.multipliers
    smaller, larger = trades(plan, plan.sites[0])
    assert (smaller.choice, smaller.freed, smaller.lost) == ("low_rank\N{NO-BREAK SPACE}3", 24, 1.0)
    assert (larger.freed, larger.lost) == (-24, -0.5)
    assert smaller.worth == pytest.approx(24 * price)
    assert reasons(plan, plan.sites[0]) == (
        f"Why not smaller: low_rank\N{NO-BREAK SPACE}3 would free 24 parameters and lose 1 nats a token more. "
        f"Spent elsewhere, that is worth {nats(24 * price)}: less than it loses.",
        "Why not larger: low_rank\N{NO-BREAK SPACE}5 would take 24 parameters more and lose 0.500 nats a token less. "
        f"Elsewhere, that is worth {nats(24 * price)}: no more than it wins, yet the limits leave no room for it. "
        "The limit has 0 left.",
    )


def test_bytes_count_where_they_are_limited() -> None:
    plan = rounded(0.44)  # of 576 bytes
    assert [partial.weights[0].becomes for partial in plan.sites] == [("dense", 12, "w4a16"), ("low_rank", 4, "w4a16")]
    smaller, larger = trades(plan, plan.sites[1])
    assert (smaller.choice, smaller.freed) == ("low_rank\N{NO-BREAK SPACE}1", 124 - 48)
    assert (larger.choice, larger.freed) == ("dense\N{NO-BREAK SPACE}w4a16", 124 - 128)
    assert smaller.worth == pytest.approx(76 * plan.prices[1])
    for_less, for_more = reasons(plan, plan.sites[1])
    assert "would free 76 bytes and lose" in for_less
    assert for_more.endswith(f" The limit has {253 - 128 - 124} left.")


def test_time_counts_where_it_is_limited() -> None:
    plan = decided(1.0, latency={PREFILL: 0.5})
    smaller, larger = trades(plan, plan.sites[0])
    assert smaller.slower == ((PREFILL, -10),)
    assert smaller.worth == pytest.approx(10 * plan.certificate.multipliers[1])
    assert "would free 24 parameters, 10 ns faster at prefill:1x8 and lose" in reasons(plan, plan.sites[0])[0]
    assert larger.slower[0][1] > 0


def test_the_cache_counts_where_it_is_limited() -> None:
    weight = Weight("k_proj", 12, 12, heads=4, cached=True)
    dense, other = WeightChoice(weight, "dense", 12), Candidate(("latent",), ("bf16",), (4,), 96, 0.5, (), ())
    site = SiteChoice("k_proj", 0, "k_proj", (dense,), 144, 144, 0.0, (), alternatives=(other,))
    plan = decided(1.0, ())
    limited = replace(
        plan,
        sites=(site,),
        recipe=changed_recipe(plan.recipe, kv_cache=1.0),
        limits=(Limit("params", 1.0, 144, 144, 144), Limit("kv_numbers", 1.0, 12, 12, 12)),
        certificate=replace(plan.certificate, multipliers=(0.0, 0.01)),
    )
    (trade,) = trades(limited, site)
    assert ([saved for _, saved in trade.cached], trade.worth) == ([8], pytest.approx(0.08))
    assert reasons(limited, site)[0] == (
        "Why not smaller: latent\N{NO-BREAK SPACE}4 would free 48 parameters, 8 numbers a token less in the "
        "KV cache and lose 0.500 nats a token more. Spent elsewhere, that is worth 0.0800: less than it loses."
    )


def test_where_no_limit_binds() -> None:
    plan = decided(1.0)
    smaller, largest = reasons(plan, plan.sites[0])
    assert smaller.endswith("No limit binds, so nothing would be won with what is freed.")
    assert largest == "Dense is the largest there is."
    assert "Elsewhere, that is worth 0: " in reasons(rounded(0.5), rounded(0.5).sites[0])[-1]


def test_where_nothing_was_weighed() -> None:
    plan, by = decided(), by_rule()
    assert reasons(by, by.sites[0]) == ("The rule uniform gave this; it weighs no other choice.",)
    bare = replace(plan, sites=tuple(replace(site, alternatives=()) for site in plan.sites))
    said = "The plan does not hold what its sites could have had instead; gac allocate writes that now."
    assert (reasons(bare, bare.sites[0]), about_dense(bare)) == ((said,), said)
    partial = replace(plan, sites=(bare.sites[0], plan.sites[1]))
    assert reasons(partial, partial.sites[0]) == ("None of the plan's forms gives this site another candidate.",)


def test_dense_weights_by_projection() -> None:
    plan = renamed(decided(1.0), "q_proj")
    ((projection, dense, layers, nearest, _, lost, _),) = stayed_dense(plan).rows
    assert (projection, dense, layers) == ("q_proj", "2 of 2", "0-1")
    assert (nearest, lost) == ("low_rank\N{NO-BREAK SPACE}5 in layer 1", "0.375")
    assert about_dense(plan).startswith("A site stays dense where each smaller candidate loses more than the param")


# --- on the GPU -----------------------------------------------------------------------------------------------------

UNEVEN = profile([measured("low_rank", 90 if r % 8 else 30 + r // 8, m=8, k=64, r=r, n=64) for r in range(1, 65)])


@pytest.mark.parametrize(
    ("table", "shared", "said"),
    [
        (
            UNEVEN,
            False,
            "On the GPU, prefill:1x8: 8 takes 31 ns; the next dim, 9, 90 ns (2.90x, no multiple of 8); the next sound "
            "one, 16, 32 ns.",
        ),
        (
            profile([measured("linear", 30, m=8, k=64, n=64)]),
            False,
            "On the GPU, prefill:1x8: the latency table holds no time of 8 or of the next dims.",
        ),
        (None, False, "What the next dim takes is not told: the profile is not at hand."),
        (UNEVEN, True, "What the next dim takes is not told: weights of this site share a GEMM."),
    ],
)
def test_the_next_dim_on_the_gpu(table: Profile | None, shared: bool, said: str) -> None:
    plan, weight = with_recipe(decided(), align=True), Weight("w", 64, 64)
    assert next_dims(plan, table, WeightChoice(weight, "low_rank", 8), shared=shared) == (said,)
    assert next_dims(plan, table, WeightChoice(weight, "dense", 64), shared=shared) == ()


def test_the_next_dim_of_a_scheme_is_told_from_its_own_rows() -> None:
    rows = [replace(measured("low_rank", 24 + r // 16, m=8, k=64, r=r, n=64), dtype="w8a8") for r in range(16, 65, 16)]
    even = [measured("low_rank", 90 if r % 8 else 30 + r // 8, m=8, k=64, r=r, n=64) for r in range(1, 65)]
    plan, weight = with_recipe(decided(), align=True), Weight("w", 64, 64)
    choice = replace(WeightChoice(weight, "low_rank", 16), scheme="w8a8")
    assert next_dims(plan, profile([*even, *rows]), choice, shared=False) == (
        "On the GPU, prefill:1x8: 16 takes 25 ns; the next dim, 17, an unknown time (no multiple of 8); the next sound "
        "one, 32, 26 ns.",
    )


def test_numbers_in_words() -> None:
    assert [duration(ns) for ns in (None, 12, 30_400, 1_166_072)] == ["unknown", "12 ns", "30.4 µs", "1.166 ms"]
    assert [nats(loss) for loss in (0.0, 0.0000517, 0.25, 2.5, 1e-9)] == ["0", "0.0000517", "0.250", "2.5", "1e-09"]
    assert ranges([0, 1, 2, 4, 7, 8]) == "0-2, 4, 7-8"
