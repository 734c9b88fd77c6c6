"""Pages are linked, and what they name exists."""

import re
import tomllib
from importlib.util import find_spec

import pytest
from pages import DOCS, PAGES, ROOT, lines, links

MAKE = (ROOT / "Makefile").read_text(encoding="utf-8")
BENCHMARKS = sorted({path.stem for path in (ROOT / "tests/benchmarks").glob("*.py")} - {"harness"})
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    folder = (ROOT / page).parent
    assert [target for target in links(PAGES[page]) if not (folder / target.split("#")[0]).exists()] == []


def test_the_index_links_every_page() -> None:
    linked = {target for page in ("index", "results") for target in links(PAGES[f"docs/{page}.md"])}
    assert {path.name for path in DOCS} - {"index.md"} <= linked


@pytest.mark.parametrize("page", PAGES)
def test_scripts_and_targets_exist(page: str) -> None:
    """Every line of a shell block that is not GAC's: scripts with their options, modules, make targets, extras."""
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


def test_every_benchmark_is_in_their_readme() -> None:
    page = (ROOT / "tests/benchmarks/README.md").read_text(encoding="utf-8")
    assert [script for script in BENCHMARKS if not re.search(rf"[/.]{script}\b", page)] == []
