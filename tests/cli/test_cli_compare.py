"""Rules and comparisons on the command line, on a tiny model."""

from pathlib import Path

import pytest
from commands import answer, run

from gac.plan.plan import Plan


@pytest.fixture
def calibration(text_file: Path) -> tuple[str, str]:
    return "--calibration", f"{text_file}:4x64"


def allocated(directory: Path, calibration: tuple[str, str], rule: str, *options: object) -> Path:
    target = directory.parent / f"{rule.replace(':', '-')}.json"
    result = run("allocate", directory, *calibration, "--rule", rule, *options, "-o", target)
    assert result.exit_code == 0, result.output
    return target


def test_plans_by_rule_can_be_compared(directory: Path, calibration: tuple[str, str]) -> None:
    rules = ("loss", "importance", "uniform:pad8", "fisher")
    files = [allocated(directory, calibration, rule) for rule in rules]
    plans = [Plan.load(file) for file in files]
    best, *others = (plan.certificate for plan in plans)
    assert [proof.method for proof in others] == list(rules[1:])
    assert best.gap == 0
    assert all(proof.gap > 0 for proof in others)
    document = answer("compare", *files)
    assert [plan["path"] for plan in document["plans"]] == list(map(str, files))
    assert [plan["limits"][0]["over"] for plan in document["plans"]] == [plan.budget.over for plan in plans]
    assert "differences" not in document


def test_two_plans_are_compared_weight_by_weight(directory: Path, calibration: tuple[str, str]) -> None:
    files = [allocated(directory, calibration, rule) for rule in ("uniform", "uniform:down8")]
    first = answer("compare", *files)["differences"][0]
    assert first["first"]["weight"]["name"] == first["second"]["weight"]["name"] == "model.layers.0.self_attn.q_proj"
    assert (first["first"]["dim"], first["second"]["dim"]) == (25, 24)
    words = " ".join(run("compare", *files).stdout.split())
    assert "plan kept over loss perplexity prefill:1x1024 decode:1@1024 aligned" in words
    assert "14 of 14 weights differ, the 10 that differ most" in words


def test_verify_says_that_highs_agrees(directory: Path, calibration: tuple[str, str]) -> None:
    result = run("allocate", directory, *calibration, "--verify", "-o", directory.parent / "plan.json")
    assert "solving the same instance with HiGHS, in 2,000 nodes at most" in result.stderr
    assert "HiGHS agrees: it proved that no choice loses 2e-06 less (limits within 1e-06) (" in result.stderr
    proof = Plan.load(directory.parent / "plan.json").certificate
    assert proof.method.endswith("; HiGHS agrees: it proved that no choice loses 2e-06 less (limits within 1e-06)")
