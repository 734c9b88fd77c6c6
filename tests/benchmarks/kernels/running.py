"""Measure what multiplies with weights of schemes, in a file that the same command goes on with."""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import fields
from functools import partial
from itertools import groupby
from multiprocessing import get_context
from typing import Any

import torch
from tests.benchmarks.kernels.candidates import Candidate, Weight

from tests.benchmarks.harness import machine, write
from tests.benchmarks.kernels.bench import KNOWN, Bench, Case, input_of

ASKED = ("--output", "--seconds", "--warm", "--retry", "--device")
"""Options of the harness that ``run`` takes, beside shapes, schemes and rows."""
WORST_ERROR = 0.1
"""Of a candidate that can win, the largest, over the root of the mean square of the result."""
WARM_SHARE = 0.5


def _cases_of(asked: argparse.Namespace, candidates: Mapping[str, Candidate]) -> Iterator[Case]:
    """All shapes, schemes and rows that are asked for, shape by shape, and of a shape scheme by scheme."""
    for shape in asked.shapes:
        k, n = map(int, shape.split("x"))
        for scheme in asked.schemes:
            for m in asked.rows:
                for name, one in candidates.items():
                    if one.can(scheme, m, k, n):
                        yield Case(scheme, k, n, m, name)


def _key_of(row: dict[str, Any]) -> tuple[object, ...]:
    """That of the case that a row is of."""
    return tuple(row[one.name] for one in fields(Case))


def _warm(cases: Sequence[Case], processes: int, device: str, until: float) -> None:
    """Let so many processes run every case once until then, so that compiled kernels are in their packages' caches."""
    groups = [list(group) for _, group in groupby(cases, lambda case: case.weight)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        try:
            seconds = sum(pool.map(partial(_warmed, device=device, until=until), groups))
        except BrokenProcessPool:
            print("a process ended while kernels were compiled", flush=True)
        else:
            print(f"kernels compiled: {seconds:.0f} s in {processes} processes", flush=True)


def _warmed(cases: Sequence[Case], device: str, until: float) -> float:
    """Run cases of one weight; seconds that it took. What fails is told when it is measured."""
    begun = time.time()
    with suppress(Exception):
        weight = Weight.of(*cases[0].weight, device) if begun < until else None
        for case in cases:
            if weight is None or time.time() > until:
                break
            with suppress(Exception):
                _run_once(case, weight, device)
    return time.time() - begun


def _run_once(case: Case, weight: Weight, device: str) -> None:
    """Compile what the case needs."""
    made = KNOWN[case.candidate].make(weight, case.m)
    made.run(made.inputs(input_of(case, device)), made.tensors)


def run(asked: argparse.Namespace, candidates: Mapping[str, Candidate]) -> list[dict[str, Any]]:
    """Measure cases until time is up, and say how many are left; all rows, also those of before."""
    end = time.time() + asked.seconds
    record = _resumed(asked)
    left = _measured(asked, candidates, record, end)
    if left:
        print(f"{left} cases are left: the same command goes on with them")
    rows: list[dict[str, Any]] = record["rows"]
    return rows


def _measured(
    asked: argparse.Namespace, candidates: Mapping[str, Candidate], record: dict[str, Any], end: float
) -> int:
    """Measure what is left until then; how many cases are left after that."""
    if asked.retry:
        record["rows"] = [row for row in record["rows"] if "failed" not in row]
    done = {_key_of(row) for row in record["rows"]}
    left = [case for case in _cases_of(asked, candidates) if case.key not in done]
    if asked.warm and left:
        _warm(left, asked.warm, asked.device, time.time() + WARM_SHARE * (end - time.time()))
    bench = Bench(asked.device)
    record["copy_bytes_per_ns"] = bench.bandwidth
    print(f"a copy reads and writes {bench.bandwidth / 1000:.2f} TB/s", flush=True)
    for number, case in enumerate(left):
        if time.time() > end:
            return len(left) - number
        row = bench.measure(case)
        record["rows"].append(row)
        write(asked.output, **record)
        print(_told(row), flush=True)
        if "failed" in row and asked.device == "cuda":
            torch.cuda.synchronize()  # raises where the device is lost: the row is written
    return 0


def _told(row: dict[str, Any]) -> str:
    head = f"{row['scheme']:9} {row['k']:5}x{row['n']:<5} m={row['m']:<4} {row['candidate']:32}"
    if "failed" in row:
        return f"{head} {row['failed']}"
    beside = f"{row['ratio']:5.2f}x bf16, {100 * row['share']:3.0f} % of bandwidth, error {row['error']:.1e}"
    return f"{head} {row['us']:8.2f} us {beside}"


Best = dict[tuple[str, int, int, int], dict[str, Any]]


def sound(row: dict[str, Any]) -> bool:
    """Whether a candidate did all of the work, and rightly."""
    return "failed" not in row and row["error"] <= WORST_ERROR and KNOWN[row["candidate"]].whole


def best(rows: Sequence[dict[str, Any]]) -> Best:
    """The fastest that is sound, by scheme, shape and rows."""
    found: Best = {}
    for row in filter(sound, rows):
        at = row["scheme"], row["k"], row["n"], row["m"]
        if at not in found or row["us"] < found[at]["us"]:
            found[at] = row
    return found


def _resumed(asked: argparse.Namespace) -> dict[str, Any]:
    """What was measured before on the same device with the same versions, or a new record."""
    settings = {name: machine()[name] for name in ("device", "versions")}
    if not asked.output.exists():
        return {"settings": settings, "rows": []}
    found: dict[str, Any] = json.loads(asked.output.read_text())
    if found["settings"] != settings:
        raise SystemExit(f"{asked.output} was measured with {found['settings']}, not {settings}")
    return found
