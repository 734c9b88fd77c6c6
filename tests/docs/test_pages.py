"""Pages are linked, and what they name exists."""

import re
import tomllib
from importlib import import_module
from importlib.util import find_spec

import pytest
from pages import DOCS, PAGES, ROOT, lines, links

MAKE = (ROOT / "Makefile").read_text(encoding="utf-8")
BENCHMARKS = sorted({path.stem for path in (ROOT / "tests/benchmarks").glob("*.py")} - {"harness"})
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_readme_has_at_most_200_lines() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 200


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
        return all((ROOT / word).exists() for word in arguments if word.startswith("tests/"))
    return program in ("gac", "transformers", "torchrun", "vllm", "jupyter", "pre-commit") or program.startswith(
        ".venv/bin/"
    )


def _script_exists(arguments: list[str]) -> bool:
    if arguments[0] == "-m" and not arguments[1].startswith("tests"):
        return find_spec(arguments[1]) is not None
    path = arguments[1].replace(".", "/") + ".py" if arguments[0] == "-m" else arguments[0]
    source = (ROOT / path).read_text(encoding="utf-8") + (ROOT / "tests/benchmarks/harness.py").read_text("utf-8")
    return all(f'"{option}"' in source for option in arguments if option.startswith("--"))


def test_the_architecture_names_every_room_and_every_rule() -> None:
    page = PAGES["docs/architecture.md"]
    parts = [path for path in (ROOT / "gac").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert [path.stem for path in parts if path.stem[:2] != "__" and f"`gac.{path.stem}`" not in page] == []
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one["name"] == "imports point inwards")
    named = dict.fromkeys(f"gac.{room}" for room in re.findall(r"`gac\.(\w+)`", page))
    assert [room for room in named if room in layers] == layers
    rules = [contract["name"] for contract in contracts]
    assert [rule for rule in rules if rule.split(":")[0].lower() not in page.lower()] == []


@pytest.mark.parametrize("script", BENCHMARKS)
def test_a_benchmark_says_how_to_run_it_and_is_in_their_readme(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(rf"[/.]{script}\b", (ROOT / "tests/benchmarks/README.md").read_text(encoding="utf-8"))
    if script == "bench_timing":
        pytest.importorskip("triton")
    monkeypatch.setattr("sys.argv", [script, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        import_module(f"tests.benchmarks.{script}").main()
    assert re.search(rf"tests[/.]benchmarks[/.]{script}\b", capsys.readouterr().out)


def test_every_result_names_its_command() -> None:
    results = ROOT / "tests/benchmarks/results"
    page = (results / "records.md").read_text(encoding="utf-8")
    patterns = re.findall(r"`([\w.*-]+\.(?:jsonl?|json\.gz|\*))`", page)
    measured = {path.name for path in results.iterdir() if path.suffix != ".md"}
    assert measured <= {path.name for pattern in patterns for path in results.glob(pattern)}


def test_hooks_run_what_make_test_runs() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    checked = re.findall(r"^\t\$\(BIN\)/(ruff \w+|mypy|lint-imports)", MAKE, re.MULTILINE)
    assert [tool for tool in checked if f".venv/bin/{tool}" not in hooks] == []
