"""The source code of both packages, parsed once."""

import ast
from functools import cache
from pathlib import Path

import gac
import gac_extensions

ROOTS = [Path(package.__file__).parent for package in (gac_extensions, gac)]


@cache
def trees() -> dict[str, ast.Module]:
    """Every module's syntax tree by its path in its package."""
    paths = [(root, path) for root in ROOTS for path in sorted(root.rglob("*.py"))]
    return {path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for root, path in paths}


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Every node of every tree, with the module's path."""
    return [(path, node) for path, tree in trees().items() for node in ast.walk(tree)]
