"""A case of what multiplies with a weight of a scheme, and its row: median, error, and bf16 beside it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from tests.benchmarks.kernels.candidates import CANDIDATES, DTYPE, Made, Weight, error
from torch import Tensor

from gac.profiling.timing.device import fingerprint
from gac.profiling.timing.stopwatch import Stopwatch
from gac.schemes import scheme_named
from tests.benchmarks.kernels.tiles import TILES

KNOWN = CANDIDATES | TILES
BASELINE = "F.linear"
COPIED_BYTES = 2**30


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


def clock_of(device: str) -> GpuClock | CpuClock:
    """What times on it."""
    return GpuClock() if device == "cuda" else CpuClock()


def copied_bytes(clock: GpuClock | CpuClock, device: str) -> float:
    """Bytes a nanosecond that a copy reads and writes."""
    size = COPIED_BYTES if device == "cuda" else 2**20
    source, target = (torch.ones(size // 4, device=device) for _ in range(2))
    call = partial(torch.mul, source, 1.0, out=target)
    us: float = clock.time(lambda count: [call] * count, 2 * size)["us"]
    return 2 * size / (1000 * us)


class Bench:
    """Measures cases, and keeps what several of them need."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._clock = clock_of(device)
        self._baselines: dict[tuple[int, int, int], float] = {}
        self._expected: dict[int, Tensor] = {}
        self._taken: tuple[tuple[str, int, int], Weight] | None = None
        self.bandwidth = copied_bytes(self._clock, device)

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
        made = KNOWN[case.candidate].make(weight, case.m)
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
            made = KNOWN[BASELINE].make(Weight.of("bf16", case.k, case.n, self._device), case.m)
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
