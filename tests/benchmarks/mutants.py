"""Mutation run: small changes of the source, one at a time, and whether the tests notice them.

    python tests/benchmarks/mutants.py --files gac/allocation --tests tests/allocation --count 40
    python tests/benchmarks/mutants.py --files gac/forms gac/schemes/integers --seed 1 --count 60 --minutes 20 \
        --tests "tests/compression -m 'not slow'" tests/schemes --processes 4 --output mutants.json

A mutant changes a comparison, an arithmetic or boolean operator, or an integer. ``--count`` of them are drawn evenly
from all places of ``--files`` (files or folders), by ``--seed``: the same draw each time for the same source. Each
runs in a copy of the checkout with all of ``--tests`` (anything that pytest takes, options too) until the first
failure; one that no test notices survives. Tests that fail without a change are left out.

The time is bounded: no mutant starts after ``--minutes``, and one that runs longer than ``--seconds`` counts as
noticed (an endless loop). By default ``--seconds`` is three times what the tests take unchanged, and 30 at least.
Printed are the survivors, ``path:line change``, and their number; ``--output`` stores every mutant. Exits with 0.
"""

import argparse
import ast
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult}
LEAST_SECONDS = 30


@dataclass(frozen=True)
class Result:
    path: str
    line: int
    change: str
    survived: bool


def changes(tree: ast.AST) -> Iterator[tuple[int, str, partial[None]]]:
    """Every change of a module: its line, its name, and a call that makes it in the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and (other := COMPARISONS.get(type(node.ops[0]))):
            name = f"{type(node.ops[0]).__name__} to {other.__name__}"
            yield node.lineno, name, partial(node.ops.__setitem__, 0, other())
        elif isinstance(node, ast.BinOp) and (other := OPERATORS.get(type(node.op))):
            yield node.lineno, f"{type(node.op).__name__} to {other.__name__}", partial(setattr, node, "op", other())
        elif isinstance(node, ast.BoolOp):
            other = ast.Or if isinstance(node.op, ast.And) else ast.And
            yield node.lineno, f"{type(node.op).__name__} to {other.__name__}", partial(setattr, node, "op", other())
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node.lineno, f"{node.value} to {node.value + 1}", partial(setattr, node, "value", node.value + 1)


def copied(folder: str) -> Path:
    """A copy of the files of the checkout that git knows or does not ignore."""
    listed = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if Path(name).is_file():
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, target)
    return Path(folder)


def pytest(copy: Path, tests: Sequence[str], *options: str, seconds: float | None = None) -> tuple[int, str]:
    """Exit status and output of the tests in a copy; 1 if they take longer."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests]
    paths = os.pathsep.join(filter(None, (str(copy), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return 1, ""
    return done.returncode, done.stdout


def passing(copy: Path, tests: list[str]) -> list[str]:
    """The tests, without those that fail unchanged."""
    status, output = pytest(copy, tests, "--tb=no", "-rfE")
    failed = [line.split(" ")[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if status not in (0, 1) or (status and not failed):
        raise SystemExit(f"pytest {shlex.join(tests)} ends with {status}:\n{output[-2000:]}")
    return [*tests, *(f"--deselect={name}" for name in failed)]


def survives(copies: "SimpleQueue[Path]", path: Path, number: int, tests: list[str], seconds: float) -> Result:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    line, name, apply = list(changes(tree))[number]
    apply()
    copy = copies.get()
    try:
        (copy / path).write_text(ast.unparse(tree), encoding="utf-8")
        status, _ = pytest(copy, tests, "-x", seconds=seconds)
        return Result(str(path), line, name, status == 0)
    finally:
        (copy / path).write_text(source, encoding="utf-8")
        copies.put(copy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", type=Path, required=True)
    parser.add_argument("--tests", nargs="+", required=True)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    paths = [path for file in options.files for path in (sorted(file.rglob("*.py")) if file.is_dir() else [file])]
    counts = {path: sum(1 for _ in changes(ast.parse(path.read_text(encoding="utf-8")))) for path in paths}
    places = [(path, number) for path, count in counts.items() for number in range(count)]
    drawn = random.Random(options.seed).sample(places, min(len(places), options.count))
    results: list[Result] = []
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        for number in range(options.processes):
            copies.put(copied(f"{folder}/{number}"))
        start = time.monotonic()
        tests = passing(Path(folder, "0"), [word for test in options.tests for word in shlex.split(test)])
        seconds = options.seconds or max(LEAST_SECONDS, 3 * (time.monotonic() - start))

        def run(place: tuple[Path, int]) -> None:
            if time.monotonic() - start < 60 * options.minutes:
                results.append(survives(copies, *place, tests, seconds))

        list(pool.map(run, drawn))
    survivors = [result for result in results if result.survived]
    for result in survivors:
        print(f"{result.path}:{result.line} {result.change}")
    print(f"{len(survivors)} of {len(results)} mutants survive; {len(drawn)} of {len(places)} places drawn")
    if options.output:
        rows = [asdict(result) for result in results]
        options.output.write_text(json.dumps({"command": shlex.join(sys.argv), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
