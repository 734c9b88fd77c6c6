"""Pages: what they name exists, every command is on one and is understood, those that read files here run.

What a page quotes below a command is what the command prints.
"""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import click
import pytest
from matplotlib.image import imread
from pages import DOCS, PAGES, QUOTES, ROOT, commands, inline_commands, is_quoted_from, lines, links

from gac.cli import main
from tests.cli.commands import run

MAKE = (ROOT / "Makefile").read_text(encoding="utf-8")
BENCHMARKS = sorted({path.stem for path in (ROOT / "tests/benchmarks").glob("*.py")} - {"harness", "problems"})
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_index_links_every_page_and_their_readme_every_benchmark() -> None:
    linked = {target for page in ("index", "results") for target in links(PAGES[f"docs/{page}.md"])}
    assert {path.name for path in DOCS} - {"index.md"} <= linked
    page = (ROOT / "tests/benchmarks/README.md").read_text(encoding="utf-8")
    assert [script for script in BENCHMARKS if not re.search(rf"[/.]{script}\b", page)] == []


def test_the_first_commands_are_the_same_everywhere() -> None:
    readme, first = commands(PAGES["README.md"]), [line.split() for line in str(main.epilog).splitlines()]
    shown = [words[1:] for words in first if words[:1] == ["gac"]]
    assert len(shown) == 4
    for page in (readme, commands(PAGES["docs/quickstart.md"])):
        assert [words for words in page if words in shown] == shown


@pytest.mark.parametrize("page", PAGES)
def test_links_scripts_and_targets_exist(page: str) -> None:
    """Every line of a shell block that is not GAC's: scripts with their options, modules, make targets, extras."""
    folder = (ROOT / page).parent
    assert [target for target in links(PAGES[page]) if not (folder / target.split("#")[0]).exists()] == []
    assert [" ".join(words) for words in lines(PAGES[page]) if not _exists(words)] == []


def _exists(words: list[str]) -> bool:
    program, *arguments = words
    if program == "make":
        return all(re.search(rf"^{target}:", MAKE, re.MULTILINE) for target in arguments if "=" not in target)
    if program in ("pip", ".venv/bin/pip"):
        extras = re.findall(r"\.\[([\w,]+)\]", " ".join(arguments))
        return {one for some in extras for one in some.split(",")} <= set(PROJECT["project"]["optional-dependencies"])
    if program == "torchrun":
        at = arguments.index("-m")
        return _script_exists(arguments[at:]) if "." in arguments[at + 1] else _exists(arguments[at + 1 :])
    if program == "python":
        return _script_exists(arguments)
    if program == ".venv/bin/pytest":
        return all((ROOT / word).exists() for word in arguments if word.endswith(".py") or "/" in word)
    return program in ("gac", "transformers", "torchrun", "vllm", "jupyter", "pre-commit") or program.startswith(
        ".venv/bin/"
    )


def _script_exists(arguments: list[str]) -> bool:
    if arguments[0] == "-m" and not arguments[1].startswith("tests"):
        return find_spec(arguments[1]) is not None
    path = arguments[1].replace(".", "/") + ".py" if arguments[0] == "-m" else arguments[0]
    source = (ROOT / path).read_text(encoding="utf-8") + (ROOT / "tests/benchmarks/harness.py").read_text("utf-8")
    return all(f'"{option}"' in source for option in arguments if option.startswith("--"))


def test_the_architecture_names_every_room_from_the_outside_in() -> None:
    page = PAGES["docs/architecture.md"]
    parts = [path for package in ("gac", "gac_extensions") for path in (ROOT / package).iterdir()]
    rooms = [path for path in parts if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert [room for room in rooms if room.stem[:2] != "__" and f"`{room.parent.name}.{room.stem}`" not in page] == []
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["name"] == "imports point inwards")
    named = dict.fromkeys(f"gac.{room}" for room in re.findall(r"`gac\.(\w+)`", page))
    assert [room for room in named if room in layers] == layers


def test_the_way_to_a_plan_is_short_and_as_written() -> None:
    rows = re.findall(r"^\| \d+ \| `(\S+)` \| (.+?) \|", PAGES["docs/architecture.md"], re.MULTILINE)
    assert 40 < len(rows) <= 45
    for file, opened in rows:
        source = (ROOT / file).read_text("utf-8")
        for name in re.findall(r"`(\w+)`", opened):
            assert re.search(rf"^ *(def|class) {name}\b|^{name}\b", source, re.MULTILINE), (file, name)


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
def test_every_line_and_quoted_command_is_understood(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is parsed by the command itself: options, their values, arguments. Only files need not be there."""
    monkeypatch.setattr(click.Path, "convert", lambda self, value, param, ctx: value)
    for words in commands(PAGES[page]):
        if words[0].startswith("--"):
            assert words[0] in options(main), words
            continue
        name, command, arguments = resolved(words)
        command.make_context(name, list(arguments))
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
    for quote in QUOTES.get(words, []):
        assert is_quoted_from(result.output, quote), result.output
    if target:
        assert (tmp_path / Path(target).name).stat().st_size > 1000
    if target.startswith("docs/"):
        assert imread(tmp_path / Path(target).name).shape == imread(target).shape


def test_readmes_ranks_are_what_the_command_below_them_prints() -> None:
    rows = re.findall(r"^\| (rank|µs) \| (.*) \|$", PAGES["README.md"], re.MULTILINE)
    ranks, times = (cells.replace("*", "").split(" | ") for _, cells in rows)
    command = next(words for words in commands(PAGES["README.md"]) if "1016:1040" in words)
    printed = [line.split()[:2] for line in run(*command).output.splitlines()]
    assert [pair for pair in zip(ranks, times, strict=True) if [*pair] not in printed] == []


def test_every_figure_is_shown_and_has_its_command() -> None:
    benchmarks = {tuple(words) for text in PAGES.values() for words in commands(text, "python")}
    made = {Path(written(words)).name for words in (*RUN, *benchmarks) if written(words).startswith("docs/")}
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
