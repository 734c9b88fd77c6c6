"""Types as a user's checker sees them: the package says that it has them, and a script knows every public name."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import gac
from gac import plots

SCRIPT = Path(__file__).with_name("user_script.py")
"""mypy checks it with the fast tests, strictly and with no ``Any``: pyproject.toml lists it."""


def imported_for_checkers() -> set[str]:
    tree = ast.parse(Path(gac.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {str(alias.asname) for node in blocks[0].body if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_checkers_and_python_know_the_same_names() -> None:
    assert imported_for_checkers() | {"__version__"} == set(gac.__all__)


def test_the_script_has_every_public_name() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    names = {ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    assert {f"gac.{name}" for name in gac.__all__} | {f"plots.{name}" for name in plots.__all__} <= names


def test_the_package_says_that_it_has_types() -> None:
    assert Path(gac.__file__).with_name("py.typed").is_file()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")
def test_pyright_finds_nothing_in_it() -> None:
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parent, check=False)
    assert done.stdout.endswith("0 errors, 0 warnings, 0 informations\n"), done.stdout + done.stderr
