"""The commands of the demo follow each other: each reads what one before it wrote."""

import shlex
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
WRITTEN = ("-o", "--plot", ">")


def _commands() -> Iterator[list[str]]:
    recipe = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return (words[1:] for line in recipe.splitlines() if (words := shlex.split(line)) and words[0].endswith("/gac"))


def test_each_command_reads_what_one_before_it_wrote() -> None:
    written: set[str] = set()
    for words in _commands():
        outputs = {after for before, after in pairwise(words) if before in WRITTEN}
        assert {word for word in words if word.startswith("demo/")} - outputs <= written, words
        written |= outputs
    assert {"demo/plan.json", "demo/plan.html", "demo/frontier.json", "demo/checkpoint", "demo/report.json"} <= written
