"""Every command on a page is one that GAC understands, and every command and option is on a page."""

import re

import click
import pytest
from pages import PAGES, ROOT, commands, inline_commands

from gac.cli import main

OTHERS = {
    *("--no-deps", "--trust-remote-code", "--model-impl", "--tensor-parallel-size", "--model_args", "--inplace"),
    *("--enable-lora", "--enforce-eager", "--quantization"),
    *("--to", "--execute", "--check", "--fix", "--format", "--help"),
}
"""Options of other programs, and those that every command has."""


def leaves(group: click.Group = main, *before: str) -> dict[str, click.Command]:
    """Every command that is no group, by its words after ``gac``."""
    by_words: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        words = (*before, name)
        by_words |= leaves(command, *words) if isinstance(command, click.Group) else {" ".join(words): command}
    return by_words


LEAVES = leaves()


def options(command: click.Command) -> set[str]:
    """The long names of all options, as in ``--align`` and ``--no-align``."""
    names = [*command.params, *([command.get_help_option(click.Context(command))] if command.add_help_option else [])]
    return {
        name for option in names if option for name in (*option.opts, *option.secondary_opts) if name.startswith("--")
    }


def resolved(words: list[str]) -> tuple[str, click.Command, list[str]]:
    for size in (2, 1):
        name = " ".join(words[:size])
        if name in LEAVES:
            return name, LEAVES[name], words[size:]
    raise AssertionError(f"no command: gac {' '.join(words)}")


@pytest.mark.parametrize("page", PAGES)
def test_every_line_is_understood(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is parsed by the command itself: options, their values, arguments. Only files need not be there."""
    monkeypatch.setattr(click.Path, "convert", lambda self, value, param, ctx: value)
    for words in commands(PAGES[page]):
        if words[0].startswith("--"):
            assert words[0] in options(main), words
            continue
        name, command, arguments = resolved(words)
        command.make_context(name, list(arguments))


@pytest.mark.parametrize("page", PAGES)
def test_quoted_commands_have_their_options(page: str) -> None:
    for quoted in inline_commands(PAGES[page]):
        words = quoted.split()
        if isinstance(main.commands.get(words[0]), click.Group) and words[1:2] in ([], ["KIND"]):
            continue
        _, command, arguments = resolved(words)
        named = {word.split("=")[0] for word in arguments if word.startswith("--")}
        assert named <= options(command), quoted


def test_every_option_on_a_page_exists() -> None:
    scripts = "".join(path.read_text("utf-8") for path in (ROOT / "tests").glob("[bf]*/*.py"))
    known = {option for command in (main, *LEAVES.values()) for option in options(command)} | OTHERS
    for page, text in PAGES.items():
        quoted = set(re.findall(r"`(--[\w-]+)", text)) - known
        assert {option for option in quoted if f'"{option}"' not in scripts} == set(), page


@pytest.mark.parametrize("name", LEAVES)
def test_every_command_and_option_is_on_a_page(name: str) -> None:
    pages = [text for text in PAGES.values() if re.search(rf"\bgac {name}\b", text)]
    assert pages, name
    missing = [
        option for option in options(LEAVES[name]) - {"--help"} if not any(_mentions(text, option) for text in pages)
    ]
    assert missing == []


def _mentions(text: str, option: str) -> bool:
    return re.search(rf"(?<![\w-]){option}(?![\w-])", text) is not None
