"""The README and the pages in ``docs``: their fenced blocks, command lines, quotes of what these print, and links."""

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
        yield from _lines_of(block)


def _lines_of(block: str) -> Iterator[list[str]]:
    for name, value in re.findall(r'^(\w+)="(.*)"$', block, re.MULTILINE):
        block = block.replace(f"${name}", value)
    for line in block.replace("\\\n", " ").splitlines():
        if (words := shlex.split(line, comments=True)) and "=" not in words[0]:
            yield words


def _quotes() -> dict[tuple[str, ...], list[str]]:
    by_command: dict[tuple[str, ...], list[str]] = {}
    for text in PAGES.values():
        words: list[str] = []
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            if language == "bash":
                *_, words = _lines_of(block)
            elif language == "text":
                by_command.setdefault(tuple(words[1:]), []).append(block)
    return by_command


QUOTES = _quotes()
"""Every ``text`` block, which quotes output, by the arguments of the command that prints it: the last one above it."""


def is_quoted_from(output: str, quote: str, any_number: bool = False) -> bool:
    """A quote's parts stand in the output, in this order; ``...`` stands for what is left out between two of them.

    Line breaks and spaces count alike. With ``any_number`` a number may be any other: for output on another model.
    """
    printed, position = _compared(output, any_number), 0
    for part in quote.split("..."):
        part = _compared(part, any_number)
        position = printed.find(part, position)
        if position < 0:
            return False
        position += len(part)
    return True


def _compared(text: str, any_number: bool) -> str:
    text = " ".join(text.split())
    return re.sub(r"[+-]?\d[\d,]*(\.\d+)?", "#", text) if any_number else text


def commands(text: str, program: str = "gac") -> list[list[str]]:
    """The arguments of every line that runs ``program``."""
    return [words for name, *words in lines(text) if name == program]


def inline_commands(text: str) -> list[str]:
    """The arguments of every command that a sentence or a table quotes, as in ``gac eval --against``."""
    return re.findall(r"`gac ((?!-)[^`]+)`", text)


def links(text: str) -> list[str]:
    """The targets of the links and figures that are no addresses."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith("http")]
