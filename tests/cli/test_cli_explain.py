"""``gac explain``: the rules a dim breaks, with and without a profile."""

from pathlib import Path

from commands import answer, refused, run


def test_without_a_profile_the_rules_and_published_costs_are_told() -> None:
    document = answer("explain", "low_rank", 1023)
    assert (document["operator"], document["axis"], document["gpu"]) == ("low_rank", "r", None)
    tier = next(rule for rule in document["rules"] if rule["rule"] == "cuBLAS alignment tier")
    assert (tier["holds"], tier["below"], tier["above"]) == (False, 1016, 1024)
    assert tier["cost"]["basis"] == "published"
    assert tier["sources"][0]["url"].startswith("https://docs.nvidia.com/")


def test_with_a_profile_the_cost_and_the_cause_are_measured(recorded: Path) -> None:
    document = answer("explain", "low_rank", 1023, "--profile", recorded)
    assert document["fixed"] == {"m": 1024, "k": 4096, "n": 4096}
    assert document["collapse"]["rescue"] == 1024
    assert document["collapse"]["cause"]["kind"] == "alignment tier"
    assert [kernel["family"] for kernel in document["ran"]] == ["cutlass", "cutlass"]


def test_the_page_shows_kernels_rules_costs_and_sources(recorded: Path) -> None:
    shown = " ".join(run("explain", "low_rank", 1023, "--profile", recorded).stdout.split())
    assert shown.startswith("low_rank r=1023 on NVIDIA Test GPU takes 151.2 us, 5.00x as long as 1024")
    assert "recorded at r=1023, m=1024 k=4096 n=4096" in shown
    assert "BROKEN cuBLAS alignment tier" in shown
    assert "cost of cuBLAS alignment tier, " in shown
    assert "https://docs.nvidia.com/cuda/cublas/index.html" in shown


def test_another_axis_of_a_chosen_shape(recorded: Path) -> None:
    document = answer("explain", "low_rank", 4095, "--axis", "n", "--shape", "m=1024,k=4096,r=1024", "--dtype", "fp16")
    assert (document["axis"], document["dtype"], document["latency_ns"]) == ("n", "fp16", None)


def test_what_a_scheme_itself_asks_is_told() -> None:
    rules = answer("explain", "linear", 1000, "--axis", "n", "--dtype", "fp8_dynamic")["rules"]
    refused_by = next(rule for rule in rules if rule["rule"] == "scheme operator")
    assert (refused_by["holds"], refused_by["below"], refused_by["above"]) == (False, 992, 1008)
    shown = " ".join(run("explain", "linear", 4008, "--dtype", "w4a16").stdout.split())
    assert "BROKEN scheme kernel" in shown
    assert "BROKEN scheme groups" in shown


def test_an_unknown_operator_names_the_nearest() -> None:
    said = refused("explain", "low_rnk", 8)
    assert said.startswith("Error: operator 'low_rnk' is unknown; expected one of linear, ")
    assert said.endswith("Did you mean 'low_rank'?\n")
