"""Names and docstrings in gac/: a name says what the value is, and a docstring is no question."""

import ast
from collections.abc import Iterator
from itertools import chain

from tests.sources import nodes

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
