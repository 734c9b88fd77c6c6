"""The source code of the package, parsed once."""

import ast
from functools import cache
from pathlib import Path

import gac

ROOT = Path(gac.__file__).parent


@cache
def trees() -> dict[str, ast.Module]:
    """Every module's syntax tree by its path in the package."""
    paths = sorted(ROOT.rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Every node of every tree, with the module's path."""
    return [(path, node) for path, tree in trees().items() for node in ast.walk(tree)]
