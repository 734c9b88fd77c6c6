"""The README and the pages in ``docs``: their fenced blocks, their command lines and their links."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "SECURITY.md", *DOCS, *sorted(ROOT.glob("notebooks/*.md")))
}


def blocks(text: str, language: str) -> list[str]:
    """What the fenced blocks of one language hold."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def lines(text: str) -> Iterator[list[str]]:
    """The words of every line in the ``bash`` blocks: continued lines joined, comments left out."""
    for block in blocks(text, "bash"):
        variables = dict(re.findall(r'^(\w+)="(.*)"$', block, re.MULTILINE))
        for name, value in variables.items():
            block = block.replace(f"${name}", value)
        for line in block.replace("\\\n", " ").splitlines():
            if (words := shlex.split(line, comments=True)) and "=" not in words[0]:
                yield words


def commands(text: str, program: str = "gac") -> list[list[str]]:
    """The arguments of every line that runs ``program``."""
    return [words for name, *words in lines(text) if name == program]


def inline_commands(text: str) -> list[str]:
    """The arguments of every command that a sentence or a table quotes, as in ``gac eval --against``."""
    return re.findall(r"`gac ((?!-)[^`]+)`", text)


def links(text: str) -> list[str]:
    """The targets of the links and figures that are no addresses."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith("http")]
