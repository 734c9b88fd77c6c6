"""Names and docstrings in gac/: a name says what the value is, and a docstring is no question."""

import ast
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

import gac

ROOT = Path(gac.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
EMPTY = {"one", "found", "own", "given", "held", "told", "whole", "beside", "together", "at"}
"""Pronouns, participles and adverbs that say nothing about a value."""
QUESTIONS = {"What", "Whether", "How", "Where", "Which"}

ALLOWED = {
    ("allocation/frontier_record.py", "together"): "stored in frontiers",
    ("plan/record.py", "together"): "stored in plans",
    ("plan/evidence.py", "held"): "stored in plans of healed models",
    ("tokens/plan.py", "whole"): "stored in plans of tokens",
    ("reporting/frontier.py", "beside"): "public keyword of gac.plots.figure_of_frontier and plot_frontier",
    ("core/errors.py", "given"): "public attribute of GacError",
    ("runtime/parallel/ranks.py", "given"): "attribute of SplitError, which becomes that of a GacError",
}


def names(tree: ast.AST) -> Iterator[str]:
    """The names of functions, classes, arguments, fields and attributes."""
    for node in ast.walk(tree):
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


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def test_names_say_what_the_value_is(trees: dict[str, ast.Module]) -> None:
    empty = {(path, name.strip("_")) for path, tree in trees.items() for name in names(tree)}
    empty = {(path, name) for path, name in empty if name in EMPTY}
    assert empty - ALLOWED.keys() == set(), "give the value the name of what it is"
    assert ALLOWED.keys() - empty == set(), "no longer there: take it out of ALLOWED"


def test_docstrings_do_not_start_as_questions(trees: dict[str, ast.Module]) -> None:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    questions = [
        f"{path}: {docstring.splitlines()[0]}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, documented) and (docstring := ast.get_docstring(node))
        if docstring.split()[0].strip(",:") in QUESTIONS
    ]
    assert not questions, "start with a verb or a noun"
