"""Measure operations on the GPU: operands from a shared pool, a check for correctness, a timing, kernel names."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from gac.forms import Operation
from gac.profiling.operators import DTYPES, OPERATORS, WORST_ERROR, Operator, Pool, relative_error
from gac.profiling.records import Header, Measurement
from gac.profiling.timing import Call, Stopwatch, Timing

_SMALLEST_POOL = 2**29
_MARK = "gac:"


class GpuMeasurer:
    """Measures operations of one dtype on the current CUDA device.

    Args:
        operations: all that will be measured (the largest decides how much memory is set aside).
        dtype: ``bf16`` or ``fp16``.
        header: the device's fingerprint.
    """

    def __init__(self, operations: Sequence[Operation], dtype: str, header: Header) -> None:
        self.dtype = dtype
        self._item = DTYPES[dtype].itemsize
        largest = max(OPERATORS[one.operator].bytes(one.axes, self._item) for one in operations)
        elements = max(_SMALLEST_POOL, 2 * (largest + 2 * header.l2_bytes) // self._item)
        self._operands = Pool.random(elements, DTYPES[dtype], "cuda")
        self._results = Pool.unset((largest + 4 * header.l2_bytes) // self._item, DTYPES[dtype], "cuda")
        self._watch = Stopwatch(header.l2_bytes, header.sm_clock_max_mhz)
        torch.cuda.synchronize()

    def measure(self, operation: Operation) -> Measurement:
        """Time one shape, cold; a shape that runs wrong or not at all gets an error and no number.

        Raises:
            RuntimeError: the device itself has failed.
        """
        try:
            with torch.cuda.stream(self._watch.stream):
                self._check(operation)
            operator = OPERATORS[operation.operator]
            timing = self._watch.time(
                lambda count: [self._call(operation) for _ in range(count)], operator.bytes(operation.axes, self._item)
            )
        except (RuntimeError, _WrongResultError) as failure:
            torch.cuda.synchronize()
            return self._failed(operation, failure)
        return self._row(operation, timing)

    def kernels(self, operations: Sequence[Operation]) -> list[tuple[str, ...]]:
        """Names of the kernels that each operation launches, in order; empty where it fails or they cannot be seen.

        Each operation has the device to itself between two synchronisations, so a kernel belongs to the operation
        during which it began.
        """
        with (
            torch.cuda.stream(self._watch.stream),
            profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace,
        ):
            for index, operation in enumerate(operations):
                try:
                    call = self._call(operation)
                    torch.cuda.synchronize()
                    with record_function(f"{_MARK}{index}"):
                        call()
                        torch.cuda.synchronize()
                except RuntimeError:
                    continue  # measure() meets the same failure and records it
        events = trace.events()
        found = names_by_mark(events) if events is not None else {}
        return [found.get(index, ()) for index in range(len(operations))]

    def _operands_of(self, operation: Operation) -> tuple[Operator, list[Tensor], list[Tensor]]:
        operator = OPERATORS[operation.operator]
        inputs = [self._operands.cut(shape) for shape in operator.inputs(operation.axes)]
        outputs = [self._results.cut(shape) for shape in operator.outputs(operation.axes)]
        return operator, inputs, outputs

    def _call(self, operation: Operation) -> Call:
        operator, inputs, outputs = self._operands_of(operation)
        return lambda: operator.run(inputs, outputs)

    def _check(self, operation: Operation) -> None:
        operator, inputs, outputs = self._operands_of(operation)
        for output in outputs:
            output.fill_(float("nan"))
        operator.run(inputs, outputs)
        error = relative_error(operator, inputs, outputs[-1])
        if not error <= WORST_ERROR:
            raise _WrongResultError(f"wrong result: relative error {error:.3g} against float32")

    def _row(self, operation: Operation, timing: Timing) -> Measurement:
        return Measurement(
            operation.operator,
            operation.axes,
            self.dtype,
            "cold",
            round(timing.median_ns),
            round(timing.iqr_ns),
            timing.samples,
            timing.sm_clock_mhz,
            timing.converged,
        )

    def _failed(self, operation: Operation, failure: Exception) -> Measurement:
        reason = " ".join(str(failure).split())[:200] or type(failure).__name__
        return Measurement(
            operation.operator, operation.axes, self.dtype, "cold", None, None, 0, None, False, (), reason
        )


class _WrongResultError(Exception):
    """The operator returned something else than it should."""


def names_by_mark(events: Iterable[Any]) -> dict[int, tuple[str, ...]]:
    """Short names of the kernels that began during each mark on the host, by the mark's number, in order."""
    kernels: list[tuple[float, str]] = []
    marks: list[tuple[float, float, int]] = []
    for event in events:
        on_host = event.device_type.name == "CPU"
        if on_host and event.name.startswith(_MARK):
            marks.append((event.time_range.start, event.time_range.end, int(event.name.removeprefix(_MARK))))
        elif not on_host and not event.name.startswith((_MARK, "Mem")):
            kernels.append((event.time_range.start, event.name))
    kernels.sort()
    starts = [start for start, _ in kernels]
    return {
        mark: tuple(short_name(name) for _, name in kernels[bisect_left(starts, begin) : bisect_right(starts, end)])
        for begin, end, mark in marks
    }


def short_name(kernel: str) -> str:
    """A kernel's name without its return type and its arguments."""
    depth, cut, start = 0, len(kernel), 0
    for place, letter in enumerate(kernel):
        if letter == "(" and depth == 0 and not kernel.startswith("(anonymous", place):
            cut = place
            break
        depth += (letter in "<(") - (letter in ">)")
        if letter == " " and depth == 0:
            start = place + 1
    return kernel[start:cut]
