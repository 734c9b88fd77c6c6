"""Mutation run: small changes of the source, one at a time, and the tests that notice them.

    python tests/benchmarks/mutants.py --count 120 --processes 14 --output mutants.json

Mutants are drawn evenly from the rooms in ``TESTS``: a comparison, an arithmetic or boolean operator, or a
number is changed. Each runs the tests of its room in a copy of the tree, until the first failure.
A mutant that none notices survives.
"""

import ast
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.harness import machine, options

TESTS = {
    "gac/allocation": ["tests/allocation"],
    "gac/forms": ["tests/compression", "tests/allocation/test_candidates.py", "tests/test_api.py"],
    "gac/plan": ["tests/test_plan.py", "tests/test_recipe.py", "tests/reporting", "tests/allocation/test_reproduce.py"],
}
SECONDS = 150
_COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
_BINARY = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult}


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    change: str
    source: str
    tests: tuple[str, ...]


def mutant(path: Path, number: int, tests: tuple[str, ...]) -> Mutant:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    line, name, apply = list(_changes(tree))[number]
    apply()
    return Mutant(str(path), line, name, ast.unparse(tree), tests)


def _changes(tree: ast.AST) -> Iterator[tuple[int, str, partial[None]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
            other = _COMPARED[type(node.ops[0])]
            yield (
                node.lineno,
                f"{type(node.ops[0]).__name__}->{other.__name__}",
                partial(node.ops.__setitem__, 0, other()),
            )
        elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            other = _BINARY[type(node.op)]
            yield node.lineno, f"{type(node.op).__name__}->{other.__name__}", partial(setattr, node, "op", other())
        elif isinstance(node, ast.BoolOp):
            other = ast.Or if isinstance(node.op, ast.And) else ast.And
            yield node.lineno, f"->{other.__name__}", partial(setattr, node, "op", other())
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node.lineno, f"{node.value}->{node.value + 1}", partial(setattr, node, "value", node.value + 1)


def failing(tests: tuple[str, ...]) -> tuple[str, ...]:
    """Options that leave out the tests that fail on this machine without any change."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *tests]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    names = [line.split(" ")[1] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return tuple(f"--deselect={name}" for name in names)


def survives(drawn: Mutant) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("gac", "tests", "profiles"):
            ignored = shutil.ignore_patterns("results", "__pycache__")
            shutil.copytree(name, Path(folder, name), ignore=ignored)
        for name in ("pyproject.toml", "README.md", "gpu_aligned_compression.py", "conftest.py"):
            if Path(name).exists():
                shutil.copy(name, folder)
        Path(folder, drawn.path).write_text(drawn.source, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *drawn.tests]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def main() -> None:
    parser = options(__doc__, "--output")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--processes", type=int, default=14)
    asked = parser.parse_args()
    drawn: list[Mutant] = []
    known_tests = {room: tuple(name for name in tests if Path(name).exists()) for room, tests in TESTS.items()}
    with ProcessPoolExecutor(asked.processes) as pool:
        deselected = dict(zip(known_tests, pool.map(failing, known_tests.values()), strict=True))
    for room in TESTS:
        known = (*known_tests[room], *deselected[room])
        paths = sorted(Path(room).rglob("*.py"))
        counts = {path: sum(1 for _ in _changes(ast.parse(path.read_text(encoding="utf-8")))) for path in paths}
        every = [(path, number) for path, count in counts.items() for number in range(count)]
        chosen = random.Random(0).sample(every, min(len(every), asked.count // len(TESTS)))
        drawn += [mutant(path, number, known) for path, number in chosen]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(asked.processes) as pool:
        for each, alive in zip(drawn, pool.map(survives, drawn), strict=True):
            rows.append({"path": each.path, "line": each.line, "change": each.change, "survived": alive})
            asked.output.write_text(json.dumps(machine() | {"rows": rows}, indent=1) + "\n")
    rooms = Counter(row["path"].split("/")[1] for row in rows if row["survived"])
    print(f"{sum(rooms.values())} of {len(drawn)} mutants survive: {dict(rooms)}")


if __name__ == "__main__":
    main()
