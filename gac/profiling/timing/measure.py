"""Measure points on the GPU: operands from shared pools, a check for correctness, a timing, the kernels that ran."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gac.core.distributed.ranks import ALONE, Ranks
from gac.core.errors import UNSAFE, ProfileError
from gac.profiling.operators import OPERATORS, WORST_ERROR, Runner, relative_error, runner_of
from gac.profiling.records import DeviceLostError, Header, Launch, Measurement, Point
from gac.profiling.timing.launches import trace
from gac.profiling.timing.operands import Pools
from gac.profiling.timing.sampling import Timing
from gac.profiling.timing.stopwatch import Stopwatch

_cuda: Any = torch.cuda
_POOL_SHARE = 0.1
_EMPTY_REASONS = ("not used because", "runtime disabled")


class _WrongError(RuntimeError):
    """A result is wrong, on any of the processes."""


class GpuMeasurer:
    """Measure points on the current CUDA device.

    Collectives are measured by several processes at once, each on its GPU, all with the same points in the same order.

    Raises:
        ProfileError: the device has no room for the operands, or does not run at all.
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
        """Time one point; one that runs wrong or not at all gets an error and no number.

        Args:
            checked: its result has been compared with float32 before, maybe on another GPU of the run.

        Raises:
            DeviceLostError: the device itself has failed, or one of several processes failed where others did not.
        """
        try:
            timing = self._time(point, checked)
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
        """Return the kernels that each point launches, in order; empty where it fails or they cannot be seen.

        Raises:
            DeviceLostError: the device itself has failed.
        """
        with torch.cuda.stream(self._watch.stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the measurement reports why a backend refuses a shape
            calls = [partial(self._call, point) for point in points]
            return trace(
                calls, lambda index, failure: DeviceLostError(Measurement.failed(points[index], _first_line(failure)))
            )

    def _time(self, point: Point, checked: bool) -> Timing:
        with torch.cuda.stream(self._watch.stream):
            if not checked:
                self._check(point)
            bytes_each = OPERATORS.get(point.operation.operator).bytes(point.operation.axes, point.dtype)
            return self._watch.time(lambda count: [self._call(point) for _ in range(count)], bytes_each, point.cache)

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
            if not error <= WORST_ERROR:
                raise _WrongError(f"wrong result: relative error {error:.3g} against float32")


def _first_line(failure: Exception) -> str:
    return UNSAFE.sub(" ", str(failure).strip().split("\n")[0]) or type(failure).__name__


def _reason(warning: warnings.WarningMessage) -> str:
    """Return what a warning says about the shape; not which backends were disabled, nor its place in PyTorch."""
    text = str(warning.message).split(" (Triggered internally")[0].strip()
    return "" if any(empty in text for empty in _EMPTY_REASONS) else text
