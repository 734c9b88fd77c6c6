"""Kernels that an operation launched, with their grids, from PyTorch's profiler."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gac.profiling.records import Launch

_MARK = "gac:"


def trace(
    prepare: Sequence[Callable[[], Callable[[], object]]], lost: Callable[[int, Exception], Exception]
) -> list[tuple[Launch, ...]]:
    """Prepare and run each call once, and return the kernels that it launched, in order; empty for one that fails.

    No other work runs on the device during a call.

    Raises:
        Exception: the device itself has failed; ``lost`` makes it from the number of the call and its exception.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as traced:
        for number, make in enumerate(prepare):
            try:
                call = make()
                torch.cuda.synchronize()
                with record_function(f"{_MARK}{number}"):
                    call()
                    torch.cuda.synchronize()
            except RuntimeError as failure:  # if the device is alive, the timing meets the same and records it
                try:
                    torch.cuda.synchronize()
                except RuntimeError as dead:
                    raise lost(number, failure) from dead
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        traced.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    launches = launches_by_mark(events)
    return [launches.get(number, ()) for number in range(len(prepare))]


def launches_by_mark(events: Iterable[Mapping[str, Any]]) -> dict[int, tuple[Launch, ...]]:
    """Return the kernels that the host launched during each mark, by the mark's number, in the order of their start.

    Args:
        events: of a Chrome trace as PyTorch writes it; a kernel and its launch share a ``correlation``.
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
    """Return a kernel's name without its return type and its arguments."""
    depth, cut, start = 0, len(kernel), 0
    for index, letter in enumerate(kernel):
        if letter == "(" and depth == 0 and not kernel.startswith("(anonymous", index):
            cut = index
            break
        depth += (letter in "<(") - (letter in ">)")
        if letter == " " and depth == 0:
            start = index + 1
    return kernel[start:cut]
