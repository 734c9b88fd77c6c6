"""Limits of memory and schemes on the command line, on a tiny model."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.commands import answer, refused, run


@pytest.fixture
def text(text_file: Path) -> tuple[str, str]:
    return "--calibration", f"{text_file}:4x64"


def test_a_memory_limit_below_the_smallest_plan_names_it(
    directory: Path, text: tuple[str, str], tmp_path: Path
) -> None:
    schemes = ("--scheme", "w8a16", "--scheme", "w4a16", "--form", "low_rank")
    asked = ("allocate", directory, *text, *schemes, "-o", tmp_path / "plan.json")
    said = refused(*asked, "--memory", 0.001)
    found = re.search(
        r"a limit of 184 of 184,320 bytes \(0\.000998264\); expected at least ([\d,]+), the smallest that forms "
        r"low_rank can reach in schemes w8a16, w4a16\. Ask for memory of ([\d.]+) or more, "
        r"or allow more forms or schemes\.",
        said,
    )
    assert found, said
    least, fraction = int(found[1].replace(",", "")), found[2]
    assert not (tmp_path / "plan.json").exists()
    document = answer(*asked, "--memory", fraction)
    assert document["bytes"]["used"] == least
    assert f"expected at least {found[1]}" in refused(*asked, "--memory", float(fraction) - 2e-6)


def test_a_table_without_the_scheme_says_so_and_plans_by_memory(text: tuple[str, str], directory: Path) -> None:
    asked = ("allocate", directory, *text, "--memory", 0.3, "--scheme", "w4a16", "-o", directory.parent / "plan.json")
    result = run(*asked)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    assert "latency prefill:1x1024: unknown, the profile" in shown
    assert json.loads((directory.parent / "plan.json").read_text())["recipe"]["limits"]["latency"] == {}


def test_a_frontier_of_bytes(directory: Path, text: tuple[str, str], tmp_path: Path) -> None:
    schemes = ("--scheme", "bf16", "--scheme", "w8a16", "--scheme", "w4a16")
    target, figure = tmp_path / "frontier.json", tmp_path / "frontier.svg"
    asked = ("--limit", "bytes", "--points", 6, *text, *schemes, "-o", target, "--plot", figure)
    document = answer("frontier", directory, *asked)
    assert document["dense"]["bytes"] == 184_320
    for point in document["points"]:
        assert point["bytes"] <= point["limit"]
        assert point["bits"] == 8 * point["bytes"] / 92_160
        assert point["certificate"]["status"] == "optimal"
    assert document["points"][0]["bits"] < 4
    shown = " ".join(run("frontier", target).stdout.split())
    assert "kept params bytes bits loss perplexity" in shown
    assert "proved to lose least for their bytes" in shown
    assert figure.stat().st_size
