"""The source code of both packages, parsed once."""

import ast
from functools import cache
from pathlib import Path

import gac
import gac_extensions

ROOTS = [Path(package.__file__).parent for package in (gac_extensions, gac)]


@cache
def trees() -> dict[str, ast.Module]:
    """Every module's syntax tree by its path in its package, without tests."""
    paths = [(root, path.relative_to(root)) for root in ROOTS for path in sorted(root.rglob("*.py"))]
    modules = [(root, path) for root, path in paths if path.parts[0] != "tests"]
    return {path.as_posix(): ast.parse((root / path).read_text(encoding="utf-8")) for root, path in modules}


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Every node of every tree, with the module's path."""
    return [(path, node) for path, tree in trees().items() for node in ast.walk(tree)]
