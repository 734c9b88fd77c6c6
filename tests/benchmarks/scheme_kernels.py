"""Kernels for weights of each scheme beside each other: which one is fastest for how many rows.

    python tests/benchmarks/scheme_kernels.py --seconds 150 --warm 12 --output scheme-kernels.json

Each case is a scheme, a shape, a number of rows and something that can multiply so (``kernels/candidates.py``). Medians
as ``gac profile`` takes them: CUDA graphs, every launch on other buffers, L2 flushed. Beside them stand the time of
``F.linear`` in bf16 in the same run, the error against float32 with the same rounded weights (and inputs, where the
scheme rounds them), and the bytes that must be read and written, as the share of the time that they would take at the
bandwidth of a copy. What fails has the first line of why instead.

Cases are written one by one, the first shapes first, and the same command goes on where time was up. ``--warm`` first
compiles kernels in so many processes, for half of the time at most.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import groupby
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gac.profiling.timing.device import fingerprint
from gac.profiling.timing.stopwatch import Stopwatch
from gac.schemes import scheme_named
from tests.benchmarks.harness import machine, markdown, options, write
from tests.benchmarks.kernels.candidates import CANDIDATES, DTYPE, Made, Weight, error

SCHEMES = ("bf16", "w8a16", "w4a16", "w4a16:64", "w3a16", "w2a16", "w8a8", "fp8")
ROWS = (1, 16, 64, 1024, 4096)
SHAPES = (
    "4096x4096", "4096x14336", "14336x4096", "4096x1024", "4096x2048", "2048x4096", "576x576", "576x1536", "1536x576",
)  # fmt: skip
BASELINE = "F.linear"
ONE_ROW_SHARE = 0.65
FP8_GAIN = 1.4
COPIED_BYTES = 2**30
WORST_ERROR = 0.1
"""Of a candidate that can win, the largest, over the root of the mean square of the result."""
WARM_SHARE = 0.5


@dataclass(frozen=True)
class Case:
    """What is timed."""

    scheme: str
    k: int
    n: int
    m: int
    candidate: str

    @property
    def bytes(self) -> int:
        """Of the weight as it is stored, and of input and output in 16 bits."""
        return scheme_named(self.scheme).bytes(self.n, self.k) + 2 * self.m * (self.k + self.n)

    @property
    def key(self) -> tuple[object, ...]:
        return tuple(asdict(self).values())

    @property
    def weight(self) -> tuple[str, int, int]:
        """What makes it."""
        return self.scheme, self.k, self.n


Calls = Callable[[int], Sequence[Callable[[], object]]]


class GpuClock:
    """Medians as ``gac profile`` takes them."""

    def __init__(self) -> None:
        header = fingerprint()
        self._watch = Stopwatch(header.l2_bytes, header.sm_clock_max_mhz)

    def time(self, calls: Calls, bytes_each: int) -> dict[str, Any]:
        torch.cuda.synchronize()
        found = self._watch.time(calls, bytes_each, "cold")
        return {"us": found.median_ns / 1000, "iqr_us": found.iqr_ns / 1000, "converged": found.converged}


class CpuClock:
    """Rough medians, to try the script."""

    def time(self, calls: Calls, bytes_each: int) -> dict[str, Any]:
        (call,) = calls(1)
        seconds = []
        for _ in range(3):
            begun = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begun)
        return {"us": 1e6 * median(seconds), "iqr_us": 0.0, "converged": False}


class Bench:
    """Measures cases, and keeps what several of them need."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._clock: GpuClock | CpuClock = GpuClock() if device == "cuda" else CpuClock()
        self._baselines: dict[tuple[int, int, int], float] = {}
        self._expected: dict[int, Tensor] = {}
        self._taken: tuple[tuple[str, int, int], Weight] | None = None
        self.bandwidth = self._copy()

    def _copy(self) -> float:
        """Bytes a nanosecond that a copy reads and writes."""
        size = COPIED_BYTES if self._device == "cuda" else 2**20
        source, target = (torch.ones(size // 4, device=self._device) for _ in range(2))
        call = partial(torch.mul, source, 1.0, out=target)
        us: float = self._clock.time(lambda count: [call] * count, 2 * size)["us"]
        return 2 * size / (1000 * us)

    def measure(self, case: Case) -> dict[str, Any]:
        """Its row."""
        try:
            bf16_us = self._baseline(case)
            found = self._timed(case)
        except Exception as failure:  # noqa: BLE001 - whatever a package raises
            return asdict(case) | {"failed": _first_line(failure)}
        share = case.bytes / self.bandwidth / (1000 * found["us"])
        beside = {"bf16_us": bf16_us, "ratio": bf16_us / found["us"], "bytes": case.bytes, "share": share}
        return asdict(case) | found | beside

    def _timed(self, case: Case) -> dict[str, Any]:
        weight, x = self._weight(case), input_of(case, self._device)
        made = CANDIDATES[case.candidate].make(weight, case.m)
        if case.m not in self._expected:
            self._expected[case.m] = weight.expected(x)
        inputs = made.inputs(x)
        off = error(made.run(inputs, made.tensors), self._expected[case.m])
        return self._clock.time(partial(_calls, made, inputs), case.bytes) | {"error": off}

    def _weight(self, case: Case) -> Weight:
        """The same as of the last case, or another."""
        if self._taken is None or self._taken[0] != case.weight:
            self._taken = None
            self._expected.clear()
            self._taken = case.weight, Weight.of(*case.weight, self._device)
        return self._taken[1]

    def _baseline(self, case: Case) -> float:
        """Microseconds of bf16."""
        at = case.k, case.n, case.m
        if at not in self._baselines:
            made = CANDIDATES[BASELINE].make(Weight.of("bf16", case.k, case.n, self._device), case.m)
            calls = partial(_calls, made, (input_of(case, self._device),))
            self._baselines[at] = self._clock.time(calls, Case("bf16", *at, BASELINE).bytes)["us"]
        return self._baselines[at]


def input_of(case: Case, device: str) -> Tensor:
    """Random, ``(m, k)``."""
    generator = torch.Generator(device).manual_seed(case.m)
    return torch.randn(case.m, case.k, device=device, generator=generator).to(DTYPE)


def _calls(made: Made, inputs: Sequence[Tensor], count: int) -> list[Callable[[], object]]:
    """Calls on buffers of their own."""
    sets = [(inputs, made.tensors)]
    sets += [(_copies(inputs), _copies(made.tensors)) for _ in range(count - 1)]
    return [partial(made.run, *one) for one in sets]


def _copies(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(one.clone() for one in tensors)


def _first_line(failure: Exception) -> str:
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0] if lines else ''}"[:200]


def cases_of(asked: argparse.Namespace) -> Iterator[Case]:
    """All that is asked for, shape by shape, and of a shape scheme by scheme."""
    for shape in asked.shapes:
        k, n = map(int, shape.split("x"))
        for scheme in asked.schemes:
            for m in asked.rows:
                for name, one in CANDIDATES.items():
                    named = not asked.candidates or any(part in (one.package, name) for part in asked.candidates)
                    if named and one.can(scheme, m, k, n):
                        yield Case(scheme, k, n, m, name)


def key_of(row: dict[str, Any]) -> tuple[object, ...]:
    """That of the case that a row is of."""
    return tuple(row[one.name] for one in fields(Case))


def warm(cases: Sequence[Case], processes: int, device: str, until: float) -> None:
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
                run_once(case, weight, device)
    return time.time() - begun


def run_once(case: Case, weight: Weight, device: str) -> None:
    """Compile what the case needs."""
    made = CANDIDATES[case.candidate].make(weight, case.m)
    made.run(made.inputs(input_of(case, device)), made.tensors)


def run(asked: argparse.Namespace, record: dict[str, Any], end: float) -> int:
    """Measure what is left until then; how many cases are left after that."""
    if asked.retry:
        record["rows"] = [row for row in record["rows"] if "failed" not in row]
    done = {key_of(row) for row in record["rows"]}
    left = [case for case in cases_of(asked) if case.key not in done]
    if asked.warm and left:
        warm(left, asked.warm, asked.device, time.time() + WARM_SHARE * (end - time.time()))
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


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """The fastest of each scheme, shape and number of rows, of those that do all of the work; and the bars."""
    best = _best(rows)
    heights = sorted({row["m"] for row in rows})
    parts = []
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        shapes = dict.fromkeys((row["k"], row["n"]) for row in rows if row["scheme"] == scheme)
        lines = [[f"{k}x{n}", *(_cell(best.get((scheme, k, n, m))) for m in heights)] for k, n in shapes]
        parts.append(f"{scheme}\n\n" + markdown(["k x n", *(f"m = {m}" for m in heights)], lines))
    return "\n".join([*parts, *_bars(best)])


Best = dict[tuple[str, int, int, int], dict[str, Any]]


def _best(rows: Sequence[dict[str, Any]]) -> Best:
    found: Best = {}
    for row in rows:
        if "failed" in row or row["error"] > WORST_ERROR or not CANDIDATES[row["candidate"]].whole:
            continue
        at = row["scheme"], row["k"], row["n"], row["m"]
        if at not in found or row["us"] < found[at]["us"]:
            found[at] = row
    return found


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['candidate']}: {row['us']:.1f} us, {row['ratio']:.2f}x, {100 * row['share']:.0f} %"


def _bars(best: Best) -> list[str]:
    """Whether the fastest reach what is wanted of them."""
    weights = [row for row in best.values() if row["m"] == 1 and row["scheme"].split(":")[0].endswith("a16")]
    fp8 = [row for row in best.values() if (row["scheme"], row["m"]) == ("fp8", 1024) and row["k"] * row["n"] > 4096**2]
    return [
        _bar(
            f"weights alone at one row, share of bandwidth, at least {ONE_ROW_SHARE}", weights, "share", ONE_ROW_SHARE
        ),
        _bar(f"fp8 at 1024 rows above 4096x4096, times bf16, at least {FP8_GAIN}", fp8, "ratio", FP8_GAIN),
    ]


def _bar(told: str, rows: Sequence[dict[str, Any]], key: str, least: float) -> str:
    under = [f"{row['scheme']} {row['k']}x{row['n']} {row[key]:.2f}" for row in rows if row[key] < least]
    return f"{told}: {len(rows) - len(under)} of {len(rows)}" + (f"; not {', '.join(under)}" if under else "")


def resumed(asked: argparse.Namespace) -> dict[str, Any]:
    """What was measured before on the same device with the same versions, or a new record."""
    settings = {name: machine()[name] for name in ("device", "versions")}
    if not asked.output.exists():
        return {"settings": settings, "rows": []}
    found: dict[str, Any] = json.loads(asked.output.read_text())
    if found["settings"] != settings:
        raise SystemExit(f"{asked.output} was measured with {found['settings']}, not {settings}")
    return found


def main() -> None:
    parser = options(__doc__, "--output")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="k x n, as 4096x1024")
    parser.add_argument("--candidates", nargs="+", help="names or packages: torch, gac, gemlite, humming")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--warm", type=int, default=0, help="processes that compile kernels first")
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args()
    end = time.time() + asked.seconds
    record = resumed(asked)
    left = run(asked, record, end)
    print(tables(record["rows"]))
    if left:
        print(f"{left} cases are left: the same command goes on with them")


if __name__ == "__main__":
    main()
