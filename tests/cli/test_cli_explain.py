"""``gac explain``: the rules a dim breaks, with and without a profile."""

from pathlib import Path

from commands import answer, refused, run


def test_without_a_profile_the_rules_and_published_costs_are_listed() -> None:
    document = answer("explain", "low_rank", 1023)
    assert (document["operator"], document["axis"], document["gpu"]) == ("low_rank", "r", None)
    tier = next(rule for rule in document["rules"] if rule["rule"] == "cuBLAS alignment tier")
    assert (tier["holds"], tier["below"], tier["above"]) == (False, 1016, 1024)
    assert tier["cost"]["basis"] == "published"
    assert tier["sources"][0]["url"].startswith("https://docs.nvidia.com/")
    words = ("low_rank", 4095, "--axis", "n", "--shape", "m=1024,k=4096,r=1024", "--dtype", "fp16")
    document = answer("explain", *words)
    assert (document["axis"], document["dtype"], document["latency_ns"]) == ("n", "fp16", None)


def test_with_a_profile_the_cost_and_the_cause_are_measured(recorded: Path) -> None:
    document = answer("explain", "low_rank", 1023, "--profile", recorded)
    assert document["fixed"] == {"m": 1024, "k": 4096, "n": 4096}
    assert (document["collapse"]["rescue"], document["collapse"]["cause"]["kind"]) == (1024, "alignment tier")
    assert [kernel["family"] for kernel in document["ran"]] == ["cutlass", "cutlass"]
    shown = " ".join(run("explain", "low_rank", 1023, "--profile", recorded).stdout.split())
    assert shown.startswith("low_rank r=1023 on NVIDIA Test GPU takes 151.2 us, 5.00x as long as 1024")
    assert "recorded at r=1023, m=1024 k=4096 n=4096" in shown
    assert "BROKEN cuBLAS alignment tier" in shown
    assert "cost of cuBLAS alignment tier, " in shown
    assert "https://docs.nvidia.com/cuda/cublas/index.html" in shown


def test_requirements_of_a_scheme() -> None:
    rules = answer("explain", "linear", 1000, "--axis", "n", "--dtype", "fp8_dynamic")["rules"]
    broken = next(rule for rule in rules if rule["rule"] == "scheme operator")
    assert (broken["holds"], broken["below"], broken["above"]) == (False, 992, 1008)
    shown = " ".join(run("explain", "linear", 4008, "--dtype", "w4a16").stdout.split())
    assert "BROKEN scheme kernel" in shown
    assert "BROKEN scheme groups" in shown


def test_an_unknown_operator_names_the_nearest() -> None:
    assert refused("explain", "low_rnk", 8).endswith("Did you mean 'low_rank'?\n")
