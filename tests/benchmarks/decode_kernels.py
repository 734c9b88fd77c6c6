"""Low-rank pairs of 1, 4 and 16 rows: the Triton kernels of ``skinny.py`` beside two cuBLAS GEMMs.

    python tests/benchmarks/decode_kernels.py --output decode_kernels.json

Llama-3-8B's shapes, bf16, cold caches, CUDA graphs, medians as ``gac profile`` takes them; cuBLAS is timed before and
after. Every way to cut a launch is tried. A case that fails is printed, the rest goes on; what does not fit in
``--seconds`` is left out, and named. It ends with two tables: the best of each case, and each way over all cases.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import torch
from skinny import PairTiles, Tiles, pair
from torch import Tensor

from gac.profiling.operators import Operand
from gac.profiling.records import Header
from gac.profiling.timing.device import fingerprint
from gac.profiling.timing.operands import Pools
from gac.profiling.timing.stopwatch import Stopwatch

SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 1024))
RANKS = (1024, 512, 256, 2048, 1536)
ROWS = (1, 4, 16)
POOL_BYTES = 4 * 2**30
SMS = 132


class Case(NamedTuple):
    m: int
    k: int
    r: int
    n: int

    @property
    def bytes(self) -> int:
        return 2 * (self.r * (self.k + self.n) + self.m * (self.k + self.n + 2 * self.r))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=75)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    until = time.monotonic() + asked.seconds
    header = fingerprint()
    bench = Bench(header)
    rows, left = [], []
    for case in cases():
        if time.monotonic() > until:
            left.append(case)
        elif (row := bench.row(case)) is not None:
            rows.append(row)
    if left:
        print(f"left out for want of time: {', '.join(map(str, left))}")
    if asked.output:
        record = {"command": sys.argv, "gpu": header.gpu, "torch": header.torch, "cuda": header.cuda, "rows": rows}
        asked.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    show(rows)


def cases() -> Iterator[Case]:
    """Ranks that save parameters; the most telling ones first."""
    for r in RANKS:
        for m in ROWS:
            yield from (Case(m, k, r, n) for k, n in SHAPES if r * (k + n) < k * n)


def ways(case: Case) -> dict[str, PairTiles]:
    """Ways to cut both launches, by name: how the first is cut, the second, and whether it is launched early."""
    firsts, seconds = (_single if case.m == 1 else _several)(case)
    return {
        f"{one}/{two}/{'early' if early else 'plain'}": PairTiles(first, second, early)
        for one, first in firsts.items()
        for two, second in seconds.items()
        for early in (False, True)
    }


def _single(case: Case) -> tuple[dict[str, Tiles], dict[str, Tiles]]:
    one_an_sm = _power(case.r / SMS, 1, 16)
    two_an_sm = max(1, one_an_sm // 2)
    firsts = {
        "rows": Tiles(one_an_sm, 4096 // one_an_sm, 4),
        "half": Tiles(two_an_sm, 4096 // two_an_sm, 3),
        "split": Tiles(16, 256, 4, parts=_power(2 * SMS * 16 / case.r, 1, 8)),
    }
    seconds = {"f16": Tiles(16, 256, 4), "f8": Tiles(8, 512, 3), "f32": Tiles(32, 128, 4)}
    return firsts, seconds


def _several(case: Case) -> tuple[dict[str, Tiles], dict[str, Tiles]]:
    parts = _power(SMS * 16 / case.r, 1, 8)
    firsts = {
        "split": Tiles(16, 256, 4, parts=parts),
        "whole": Tiles(16, 256, 4),
        "split2": Tiles(16, 128, 4, parts=min(8, 2 * parts)),
    }
    seconds = {"f16": Tiles(16, 128, 3), "f32": Tiles(32, 128, 3), "f64": Tiles(64, 64, 3)}
    return firsts, seconds


def _power(value: float, least: int, most: int) -> int:
    """The power of two at or below the value, between the two ends."""
    return max(least, min(most, 1 << max(0, int(value).bit_length() - 1)))


class Bench:
    """Times cases on the current GPU."""

    def __init__(self, header: Header) -> None:
        self._pools = Pools("cuda", POOL_BYTES)
        self._watch = Stopwatch(header.l2_bytes, header.sm_clock_max_mhz)

    def row(self, case: Case) -> dict[str, object] | None:
        """Median us of cuBLAS and of every way, and its largest relative error; None where cuBLAS itself fails."""
        try:
            before = self._time(case, plain)
            found = {name: self._way(case, name, tiles) for name, tiles in ways(case).items()}
            after = self._time(case, plain)
        except Exception as failure:  # noqa: BLE001 - one case must not end the others
            print(f"{case}: {_line(failure)}", flush=True)
            return None
        reference = (before + after) / 2
        kept = {name: one for name, one in found.items() if one is not None}
        row = {**case._asdict(), "plain_us": reference, "apart": abs(after / before - 1), "ways": kept}
        best = min(kept, key=lambda name: kept[name]["us"], default=None)
        said = f"best {best} {kept[best]['us']:.2f} us, {reference / kept[best]['us']:.2f}x" if best else "nothing ran"
        print(f"{tuple(case)}: plain {before:.2f} and {after:.2f} us, {said}", flush=True)
        return row

    def _way(self, case: Case, name: str, tiles: PairTiles) -> dict[str, float] | None:
        def run(x: Tensor, first: Tensor, second: Tensor, hidden: Tensor, out: Tensor) -> None:
            pair(x, first, second, out, tiles)

        try:
            error = self._error(case, run)
            if not error < 2e-2:
                print(f"{tuple(case)} {name}: WRONG, relative error {error:.3g}", flush=True)
                return None
            return {"us": self._time(case, run), "error": error}
        except Exception as failure:  # noqa: BLE001 - likewise
            print(f"{tuple(case)} {name}: {_line(failure)}", flush=True)
            return None

    def _operands(self, case: Case) -> tuple[Tensor, ...]:
        m, k, r, n = case
        shapes = ((m, k), (r, k), (n, r))
        inputs = tuple(self._pools.cut(Operand(shape, "bf16")) for shape in shapes)
        return (*inputs, *(self._pools.cut_output(Operand(shape, "bf16")) for shape in ((m, r), (m, n))))

    def _time(self, case: Case, run: Callable[..., None]) -> float:
        def calls(count: int) -> list[Callable[[], None]]:
            return [partial(run, *self._operands(case)) for _ in range(count)]

        return self._watch.time(calls, case.bytes, "cold").median_ns / 1000

    def _error(self, case: Case, run: Callable[..., None]) -> float:
        """Largest relative Frobenius error against float32 of three launches in a row on the timing's stream."""
        worst = 0.0
        with torch.cuda.stream(self._watch.stream):
            for _ in range(3):
                x, first, second, hidden, out = self._operands(case)
                out.fill_(float("nan"))
                run(x, first, second, hidden, out)
                expected = (x.float() @ first.float().t()) @ second.float().t()
                error = float((out.float() - expected).norm() / expected.norm())
                worst = error if error != error else max(worst, error)
        return worst


def plain(x: Tensor, first: Tensor, second: Tensor, hidden: Tensor, out: Tensor) -> None:
    torch.mm(x, first.t(), out=hidden)
    torch.mm(hidden, second.t(), out=out)


def _line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {(str(failure).strip().splitlines() or [''])[0][:200]}"


def show(rows: list[dict]) -> None:
    """The best way of each case, then each way over all cases."""
    print(f"\n{'m':>2} {'k':>5} {'r':>4} {'n':>5}  {'cuBLAS':>7} {'best':>7} {'gain':>5}  {'error':>7}  way")
    gains: dict[tuple[int, str], list[float]] = defaultdict(list)
    for row in sorted(rows, key=lambda one: (one["m"], one["k"], one["n"], one["r"])):
        ways_of, reference = row["ways"], row["plain_us"]
        for name, one in ways_of.items():
            gains[row["m"], name].append(reference / one["us"])
        if ways_of:
            best = min(ways_of, key=lambda name: ways_of[name]["us"])
            us, error = ways_of[best]["us"], max(one["error"] for one in ways_of.values())
            print(
                f"{row['m']:2} {row['k']:5} {row['r']:4} {row['n']:5}  {reference:7.2f} {us:7.2f} "
                f"{reference / us:4.2f}x  {error:7.1e}  {best}"
            )
    print("\nover all cases of m: geometric mean of cuBLAS / way, worst, best, cases")
    for (m, name), found in sorted(gains.items(), key=lambda one: (one[0][0], -geometric_mean(one[1]))):
        print(f"{m:2} {name:18} {geometric_mean(found):5.3f} {min(found):5.3f} {max(found):5.3f} {len(found)}")


if __name__ == "__main__":
    main()
