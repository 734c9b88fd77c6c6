"""Rules and comparisons on the command line, on a tiny model."""

from pathlib import Path

from commands import answer, run

from gac.plan.plan import Plan


def allocated(directory: Path, text_file: Path, rule: str) -> Path:
    target = directory.parent / f"{rule.replace(':', '-')}.json"
    result = run("allocate", directory, "--calibration", f"{text_file}:4x64", "--rule", rule, "-o", target)
    assert result.exit_code == 0, result.output
    return target


def test_plans_by_rule_are_compared_and_two_of_them_weight_by_weight(directory: Path, text_file: Path) -> None:
    rules = ("loss", "importance", "uniform", "uniform:down8")
    files = [allocated(directory, text_file, rule) for rule in rules]
    plans = [Plan.load(file) for file in files]
    best, *others = (plan.certificate for plan in plans)
    assert [proof.method for proof in others] == list(rules[1:])
    assert best.gap == 0
    assert all(proof.gap > 0 for proof in others)
    document = answer("compare", *files)
    assert [plan["path"] for plan in document["plans"]] == list(map(str, files))
    assert [plan["limits"][0]["over"] for plan in document["plans"]] == [plan.budget.over for plan in plans]
    assert "differences" not in document
    first = answer("compare", *files[2:])["differences"][0]
    assert first["first"]["weight"]["name"] == first["second"]["weight"]["name"] == "model.layers.0.self_attn.q_proj"
    assert (first["first"]["dim"], first["second"]["dim"]) == (25, 24)
    words = " ".join(run("compare", *files[2:]).stdout.split())
    assert "plan kept over loss perplexity prefill:1x1024 decode:1@1024 aligned" in words
    assert "14 of 14 weights differ, the 10 that differ most" in words


def test_verify_says_that_highs_agrees(directory: Path, text_file: Path) -> None:
    target = directory.parent / "plan.json"
    result = run("allocate", directory, "--calibration", f"{text_file}:4x64", "--verify", "-o", target)
    agrees = "HiGHS agrees: it proved that none is better by 2e-06 of the sum (limits within 1e-06)"
    assert agrees in result.stderr
    assert Plan.load(target).certificate.method.endswith(f"; {agrees}")
