"""A GPU that is made up of this CPU, on which several processes time collectives of gloo together.

Whether a sample comes too late, and how long it takes, is another thing in each process, as on real GPUs: were they to
decide from their own samples, they would soon wait for each other for ever.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gac.core.distributed import launch
from gac.profiling.operators import operation, runner_of
from gac.profiling.records import Point
from gac.profiling.sweeps import collectives
from gac.profiling.timing import measure, stopwatch
from gac.profiling.timing.operands import Pools
from tests.headers import make_header

POINTS = [
    Point(operation(name, gpus=2, m=m, n=n))
    for name, shapes in {"all_reduce": [(3, 64)], "all_gather": [(1, 16), (3, 64)], "reduce_scatter": [(3, 64)]}.items()
    for m, n in shapes
]


class Event:
    """Now; it has come too early, or not, by chance."""

    dice = random.Random(1)

    def __init__(self, enable_timing: bool) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return self.dice.random() < 0.1

    def elapsed_time(self, later: "Event") -> float:
        return max(1e3 * (later._at - self._at), 1e-3)


class Graph:
    """Runs again what it has captured."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._calls = calls

    def replay(self) -> None:
        for call in self._calls:
            call()


class Stopwatch(stopwatch.Stopwatch):
    """The real one, with the parts of a GPU that are made up."""

    def _capture(self, calls: Sequence[Callable[[], object]]) -> Any:
        return Graph(calls)


@contextmanager
def _at_once(_stream: object) -> Iterator[None]:
    yield


def _on_cpu(make: Callable[..., torch.Tensor], *given: Any, **how: Any) -> torch.Tensor:
    return make(*given, **how | {"device": "cpu"})


def make_up() -> None:
    """Let this process see a GPU; that of rank r has r as the last digit of its number."""
    rank = launch.rank()
    Event.dice = random.Random(rank)
    on_cpu = {name: partial(_on_cpu, getattr(torch, name)) for name in ("ones", "empty", "zeros")}
    cuda = SimpleNamespace(
        Event=Event,
        Stream=lambda: SimpleNamespace(synchronize=lambda: None),
        stream=_at_once,
        _sleep=lambda _cycles: None,
        graph_pool_handle=lambda: None,
        empty_cache=lambda: None,
        mem_get_info=lambda: (2**24 + 4096 * rank, 2**24),
        synchronize=lambda: None,
    )
    stopwatch._cuda = measure._cuda = cuda
    stopwatch.torch = SimpleNamespace(**on_cpu, cuda=cuda, sum=torch.sum, float32=torch.float32, int32=torch.int32)
    stopwatch._WARM_UP_SECONDS = 0.0
    measure.torch = SimpleNamespace(cuda=cuda)
    measure.Stopwatch = Stopwatch
    measure.Pools = lambda _device, limit: Pools("cpu", limit)
    header = collectives.replace(make_header(), device=f"{rank:016}", l2_bytes=4096)
    collectives.fingerprint = lambda: header
    collectives.uuid = lambda: str(rank)
    collectives.link_between = lambda uuids: "NVLink" if uuids == ["0", "1"] else "?"


def sweep(path: Path) -> None:
    """The all-gather of several rows is wrong in one process."""
    _at_gather(lambda result: [one if len(one) == 1 else torch.zeros_like(one) for one in result])
    collectives.profile_collectives(POINTS, path, passes=2)


def fail_on_one(path: Path) -> None:
    def fail(_result: object) -> Any:
        raise RuntimeError("a fault")

    _at_gather(fail)
    collectives.profile_collectives(POINTS, path, passes=1)


def _at_gather(happens: Callable[[Any], Any]) -> None:
    """What happens to the results of all-gathers in the process of rank 1."""
    make_up()
    runner = runner_of("all_gather")
    if launch.rank() == 1:
        run = runner.run
        runner.run = lambda *given: happens(run(*given))
