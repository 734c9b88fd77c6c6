"""Commands that read what is in the repository run as they are; the figures of the pages are made by them."""

import shlex
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.image import imread
from pages import PAGES, ROOT, commands, links

from tests.cli.commands import run

READERS = ("cliffs", "compare", "explain", "graph", "plot", "profiles", "report", "study")
WRITES = ("-o", "--output", "--plot")
WRITTEN = [[word] for word in WRITES]


def runs_here(words: list[str]) -> bool:
    """It needs no GPU, no network, and no file that the reader has to make."""
    given = [word for before, word in pairwise(words) if before not in WRITES]
    stored = all((ROOT / word).exists() for word in given if word.endswith((".json", ".jsonl")))
    measures = words[0] == "study" and len(words) > 1 and "--profile" not in words
    return words[0] in READERS and stored and not measures and not any(word.isupper() for word in given)


def is_part(words: list[str], others: list[list[str]]) -> bool:
    """Another command does the same, and writes it to a file too."""
    return any(words == other[: len(words)] and other[len(words) : len(words) + 1] in WRITTEN for other in others)


HERE = [words for text in PAGES.values() for words in commands(text) if runs_here(words)]
RUN = sorted({tuple(words) for words in HERE if not is_part(words, HERE)})


def written(words: tuple[str, ...]) -> str:
    """The file that a command writes, or nothing."""
    return next((word for before, word in pairwise(words) if before in WRITES), "")


@pytest.mark.parametrize("words", RUN, ids=" ".join)
def test_a_command_of_the_pages_runs(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure of the pages comes out in the size in which it is stored."""
    monkeypatch.chdir(ROOT)
    target = written(words)
    result = run(*(tmp_path / Path(target).name if word == target else word for word in words))
    assert result.exit_code == 0, result.output
    if target:
        assert (tmp_path / Path(target).name).stat().st_size > 1000
    if target.startswith("docs/"):
        assert imread(tmp_path / Path(target).name).shape == imread(target).shape


def test_every_figure_is_shown_and_has_its_command() -> None:
    made = {Path(written(words)).name for words in RUN if written(words).startswith("docs/")}
    shown = {Path(target).name for text in PAGES.values() for target in links(text) if target.endswith(".png")}
    assert made == shown == {path.name for path in (ROOT / "docs").glob("*.png")}


def _commands() -> Iterator[list[str]]:
    recipe = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return (words[1:] for line in recipe.splitlines() if (words := shlex.split(line)) and words[0].endswith("/gac"))


@pytest.mark.slow
def test_each_command_of_the_demo_reads_what_one_before_it_wrote() -> None:
    written: set[str] = set()
    for words in _commands():
        outputs = {after for before, after in pairwise(words) if before in (*WRITES, ">")}
        assert {word for word in words if word.startswith("demo/")} - outputs <= written, words
        written |= outputs
    assert {"demo/plan.json", "demo/plan.html", "demo/frontier.json", "demo/checkpoint", "demo/report.json"} <= written
