"""Measure points on the GPU: operands from shared pools, a check for correctness, a timing, the kernels that ran."""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from gac.core.distributed.ranks import ALONE, Ranks
from gac.core.errors import UNSAFE, ProfileError
from gac.profiling.operators import OPERATORS, runner_of, work_of
from gac.profiling.operators.base import Runner, relative_error
from gac.profiling.records import DeviceLostError, Header, Launch, Measurement, Point
from gac.profiling.timing.operands import Pools
from gac.profiling.timing.stopwatch import Stopwatch

_cuda: Any = torch.cuda
_POOL_SHARE = 0.1
_MARK = "gac:"
_EMPTY_REASONS = ("not used because", "runtime disabled")


class _WrongError(RuntimeError): ...


class GpuMeasurer:
    """Measure points on the current CUDA device; ProfileError where it has no room, or does not run at all.

    Collectives are measured by several processes at once, each on its GPU, all with the same points in the same order.
    """

    def __init__(self, header: Header, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        try:
            _cuda.empty_cache()  # an earlier measurer's memory counts as free
            free, _ = _cuda.mem_get_info()
            self._pools = Pools("cuda", min(ranks.gathered(int(_POOL_SHARE * free))))  # all get the same operands
            self._watch = Stopwatch(header.l2_bytes, header.sm_clock_max_mhz, ranks)
            torch.cuda.synchronize()
        except RuntimeError as failure:
            raise ProfileError(
                f"the GPU cannot be prepared: {_first_line(failure)}",
                "a GPU that works, with a tenth of its memory free",
                "Look at nvidia-smi: end what else uses the GPU, or restart it.",
            ) from failure

    def measure(self, point: Point, checked: bool = False) -> Measurement:
        """Time one point, as ``Measurer`` says; one that runs wrong or not at all gets an error and no number.

        Raises:
            DeviceLostError: the device itself has failed, or one of several processes failed where others did not.
        """
        try:
            with torch.cuda.stream(self._watch.stream):
                if not checked:
                    self._check(point)
                _, moved = work_of(point.operation, point.dtype)
                timing = self._watch.time(lambda count: [self._call(point) for _ in range(count)], moved, point.cache)
            ns = round(timing.median_ns), round(timing.iqr_ns)
            return Measurement.of(point, *ns, timing.samples, timing.sm_clock_mhz, timing.converged)
        except RuntimeError as failure:
            row = Measurement.failed(point, _first_line(failure))
            if self._ranks.count > 1 and not isinstance(failure, _WrongError):
                raise DeviceLostError(row) from failure  # the others wait for this one on their GPUs
        try:
            torch.cuda.synchronize()
        except RuntimeError as lost:
            raise DeviceLostError(row) from lost
        return row

    def launches(self, points: Sequence[Point]) -> list[tuple[Launch, ...]]:
        """Return the kernels that each point launches, in order; empty where it fails or they cannot be seen."""
        with torch.cuda.stream(self._watch.stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the measurement reports why a backend refuses a shape
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as traced:
                for number, point in enumerate(points):
                    try:
                        call = self._call(point)
                        torch.cuda.synchronize()
                        with record_function(f"{_MARK}{number}"):
                            call()
                            torch.cuda.synchronize()
                    except RuntimeError as failure:  # if the device is alive, the timing meets the same and records it
                        try:
                            torch.cuda.synchronize()
                        except RuntimeError as dead:
                            raise DeviceLostError(Measurement.failed(point, _first_line(failure))) from dead
            with TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                traced.export_chrome_trace(str(path))
                events = json.loads(path.read_text())["traceEvents"]
        launches = launches_by_mark(events)
        return [launches.get(number, ()) for number in range(len(points))]

    def _cut(self, point: Point) -> tuple[Runner, list[Any], list[Tensor]]:
        name, axes = point.operation.operator, point.operation.axes
        runner = runner_of(name, point.dtype)
        inputs = list(runner.operands(axes, point.dtype, self._pools.cut))
        outputs = OPERATORS.get(name).outputs(axes, point.dtype)
        return runner, inputs, [self._pools.cut_output(operand) for operand in outputs]

    def _call(self, point: Point) -> Callable[[], object]:
        runner, inputs, outputs = self._cut(point)
        return lambda: runner.run(inputs, outputs)

    def _check(self, point: Point) -> None:
        """Run once on outputs full of NaN, and compare with float32.

        PyTorch explains in warnings why a backend refuses a shape, and then raises that there is none: both are kept.
        """
        runner, inputs, outputs = self._cut(point)
        for output in outputs:
            output.fill_(float("nan"))
        with warnings.catch_warnings(record=True) as reasons:
            warnings.simplefilter("always")
            try:
                result = runner.run(inputs, outputs)
            except RuntimeError as failure:
                messages = dict.fromkeys([_first_line(failure), *map(_reason, reasons)])
                raise RuntimeError(" ".join(filter(None, messages))) from failure
        errors = self._ranks.gathered(relative_error(runner, inputs, result))
        for error in errors:
            if not error <= runner.worst_error:
                raise _WrongError(f"wrong result: relative error {error:.3g} against float32")


def _first_line(failure: Exception) -> str:
    return UNSAFE.sub(" ", str(failure).strip().split("\n")[0]) or type(failure).__name__


def _reason(warning: warnings.WarningMessage) -> str:
    """Return what a warning says about the shape; not which backends were disabled, nor its place in PyTorch."""
    text = str(warning.message).split(" (Triggered internally")[0].strip()
    return "" if any(empty in text for empty in _EMPTY_REASONS) else text


def launches_by_mark(events: Iterable[Mapping[str, Any]]) -> dict[int, tuple[Launch, ...]]:
    """Return the kernels that the host launched during each mark, by the mark's number, in the order of their start.

    Events are those of a Chrome trace as PyTorch writes it; a kernel and its launch share a ``correlation``.
    """
    marks: list[tuple[float, float, int]] = []
    launched: dict[int, float] = {}
    kernels: list[tuple[float, int, Launch]] = []
    for event in events:
        kind, name, details = event.get("cat"), str(event.get("name")), event.get("args", {})
        if kind == "user_annotation" and name.startswith(_MARK):
            marks.append((event["ts"], event["ts"] + event["dur"], int(name.removeprefix(_MARK))))
        elif kind in {"cuda_runtime", "cuda_driver"} and "correlation" in details:
            launched[details["correlation"]] = event["ts"]
        elif kind == "kernel":
            extents = tuple(details["grid"]), tuple(details["block"]), details["shared memory"]
            kernels.append((event["ts"], details["correlation"], Launch(short_name(name), *extents)))
    by_number: dict[int, list[Launch]] = {}
    for _, correlation, launch in sorted(kernels, key=lambda kernel: kernel[0]):
        moment = launched.get(correlation, math.nan)  # NaN is in no mark
        number = next((number for begin, end, number in marks if begin <= moment <= end), None)
        if number is not None:
            by_number.setdefault(number, []).append(launch)
    return {number: tuple(launches) for number, launches in by_number.items()}


def short_name(kernel: str) -> str:
    depth, cut, start = 0, len(kernel), 0
    for index, letter in enumerate(kernel):
        if letter == "(" and depth == 0 and not kernel.startswith("(anonymous", index):
            cut = index
            break
        depth += (letter in "<(") - (letter in ">)")
        if letter == " " and depth == 0:
            start = index + 1
    return kernel[start:cut]
