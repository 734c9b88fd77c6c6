"""The package: its names and docstrings, its types, what importing it loads, and its name on the package index."""

import ast
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

import gac
import gpu_aligned_compression as start
from gac import plots
from tests.sources import nodes

SCRIPT = Path(__file__).with_name("user_script.py")
"""mypy checks it with the fast tests, strictly and with no ``Any``: pyproject.toml lists it."""


def imported_for_checkers() -> set[str]:
    tree = ast.parse(Path(gac.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {str(alias.asname) for node in blocks[0].body if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_the_package_python_checkers_and_the_script_know_the_same_names() -> None:
    assert imported_for_checkers() | {"__version__"} == set(gac.__all__)
    text = SCRIPT.read_text(encoding="utf-8")
    names = {ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    assert {f"gac.{name}" for name in gac.__all__} | {f"plots.{name}" for name in plots.__all__} <= names
    assert Path(gac.__file__).with_name("py.typed").is_file()
    assert all(hasattr(gac, name) for name in gac.__all__)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")
def test_pyright_finds_nothing_in_it() -> None:
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parent, check=False)
    assert done.stdout.endswith("0 errors, 0 warnings, 0 informations\n"), done.stdout + done.stderr


HEAVY = ("torch", "transformers", "scipy", "ortools", "datasets", "pydantic", "rich")

PLANNING = (
    "gac.allocation.crosscheck",
    "gac.allocation.resolve",
    "gac_extensions.lab.sweep_tables",
    "gac_extensions.lab.tables",
    "gac.plan.summary",
    "gac.plots",
    "gac_extensions.lab.cliffs",
    "gac.profiling.sweeps.coverage",
    "gac.profiling.sweeps.sweep",
    "gac.reporting.evaluation",
    "gac.reporting.gpu_tables",
    "gac_extensions.tokens.page",
)
"""Between them they load every module that measures no model: plans, forms, families, tables, cliffs, studies."""


STEPS = {
    "import gac.cli": {*HEAVY, "numpy"},
    "import gac.plan.plan": {*HEAVY, "pandas", "matplotlib"},
    f"import {', '.join(PLANNING)}": {"torch", "transformers"},
    "gac.cli.main(['profiles', '--json'], standalone_mode=False)": {"torch", "transformers"},
}
"""What an interpreter does, and what it has not loaded then: what none of the modules loads, none loads by itself."""


def test_planning_and_the_command_line_load_nothing_heavy() -> None:
    names = "print('now', *{name.partition('.')[0] for name in sys.modules})"
    code = "\n".join(["import sys", *(f"{statement}\n{names}" for statement in STEPS)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = [line.split() for line in done.stdout.splitlines() if line.startswith("now ")]
    assert [heavy & {*names} for heavy, names in zip(STEPS.values(), loaded, strict=True)] == [set()] * len(STEPS)


@pytest.mark.slow
def test_transformers_learns_of_compressed_models_when_it_is_loaded() -> None:
    code = (
        "import gac, sys, importlib.util\n"
        "importlib.util.find_spec('transformers.models.auto.configuration_auto')\n"  # a look does not count
        "from transformers import CONFIG_MAPPING\n"
        "assert 'gac_llama' in CONFIG_MAPPING\n"
        "assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith('gac')]\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


ROOT = Path(__file__).parent.parent


def _run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.argv[0] = 'gac'; import gpu_aligned_compression as start; start.main()"
    environment = {"PYTHONPATH": f"{path}:{ROOT}", "PATH": ""}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=path, capture_output=True, text=True, env=environment, check=False)


def test_the_name_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == gac.__distribution__ == start.NAME
    assert project["scripts"] == {"gac": "gpu_aligned_compression:main"}


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        ("gac/__init__.py", "", "import gac finds another tool in {}/gac/__init__.py, not gpu-aligned-compression"),
        ("gac-3.5.dist-info/METADATA", "Name: gac\nVersion: 3.5\n", "the tool gac 3.5 is installed b"),
        ("", "", ""),
    ],
)
def test_the_version_tells_of_another_package_called_gac(file: str, text: str, error: str, tmp_path: Path) -> None:
    if file:
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(text)
    ran = _run(tmp_path, "--version")
    assert ran.returncode == bool(error)
    if error:
        assert ran.stderr.startswith("Error: " + error.format(tmp_path))
    else:
        assert ran.stdout == f"gac, version {gac.__version__} (gpu-aligned-compression)\n"


EMPTY = {"one", "found", "own", "given", "held", "told", "whole", "beside", "together", "at"}
"""Pronouns, participles and adverbs that say nothing about a value."""
QUESTIONS = {"What", "Whether", "How", "Where", "Which"}

ALLOWED = {
    ("allocation/frontier_record.py", "together"): "stored in frontiers",
    ("plan/record.py", "together"): "stored in plans",
    ("plan/evidence.py", "held"): "stored in plans of healed models",
    ("tokens/plan.py", "whole"): "stored in plans of tokens",
    ("core/errors.py", "given"): "public attribute of GacError",
    ("runtime/parallel/ranks.py", "given"): "attribute of SplitError, which becomes that of a GacError",
}


def names(node: ast.AST) -> Iterator[str]:
    """The names of functions, classes, arguments, fields and attributes."""
    match node:
        case ast.ClassDef(name=name, body=body):
            yield name
            fields = (
                each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)] for each in body
            )
            yield from (field.id for field in chain(*fields) if isinstance(field, ast.Name))
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
            yield name
        case ast.Attribute(attr=name, ctx=ast.Store()):
            yield name


def test_names_say_what_the_value_is() -> None:
    empty = {(path, name.strip("_")) for path, node in nodes() for name in names(node) if name.strip("_") in EMPTY}
    assert empty - ALLOWED.keys() == set(), "give the value the name of what it is"
    assert ALLOWED.keys() - empty == set(), "no longer there: take it out of ALLOWED"


def test_docstrings_do_not_start_as_questions() -> None:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [(path, ast.get_docstring(node)) for path, node in nodes() if isinstance(node, documented)]
    questions = [(path, text) for path, text in texts if text and text.split()[0].strip(",:") in QUESTIONS]
    assert not questions, "start with a verb or a noun"
