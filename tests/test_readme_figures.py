"""The figures in the README are made by the commands that it names."""

import re
import shlex
from pathlib import Path

import pytest
from matplotlib.image import imread

from tests.cli.commands import run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^gac (.*(?:-o|--plot) docs/\S+\.png)(?: +#.*)?$", README, flags=re.MULTILINE)
SHOWN = re.findall(r"\]\((docs/\S+\.png)\)", README)


def test_every_figure_is_stored_and_has_its_command() -> None:
    made = [command.split()[-1] for command in COMMANDS]
    assert sorted(made) == sorted(SHOWN) == sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.png"))
    assert len(made) >= 3


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_draws_a_figure_of_the_same_size(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    *words, stored = shlex.split(command)
    result = run(*words, tmp_path / "figure.png")
    assert result.exit_code == 0, result.output
    assert imread(tmp_path / "figure.png").shape == imread(stored).shape
