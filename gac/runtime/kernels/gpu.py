"""When Triton kernels can run, how they are launched and become operators, and what is said where they cannot run."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, library

HAS_TRITON = find_spec("triton") is not None
SIXTEEN_BIT = (torch.bfloat16, torch.float16)

F = TypeVar("F", bound=Callable[..., Any])

_logger = logging.getLogger("gac")
_said: set[tuple[str, str]] = set()


def kernels_run_on(device: torch.device) -> bool:
    """Return whether Triton kernels that read bfloat16 run there."""
    return device.type == "cuda" and HAS_TRITON and torch.cuda.get_device_capability(device) >= (8, 0)


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no kernel of 16-bit inputs can run there; None where they can."""
    if device.type != "cuda":
        return f"the model is on the {device.type}"
    if not HAS_TRITON:
        return "Triton is not installed"
    if dtype not in SIXTEEN_BIT:
        return f"inputs are {str(dtype).removeprefix('torch.')}, not bfloat16 or float16"
    return None


def warn_slow_path_once(x: Tensor, reason: str, what: str = "weights are unpacked in plain PyTorch") -> None:
    """Say once, for each reason, what a GPU does in plain PyTorch."""
    if x.is_cuda and (what, reason) not in _said and not torch.compiler.is_compiling():
        _said.add((what, reason))
        _logger.warning("%s, which is slow: %s", what, reason)


def launching_on(x: Tensor) -> Any:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()  # Triton launches on the current device


def launch_options(early: bool) -> dict[str, bool]:
    """Return Triton's options of a launch; early: before the kernel before it has ended, on Hopper GPUs."""
    return {"launch_pdl": True} if early else {}  # Triton's interpreter knows no such option


def starts_early(x: Tensor) -> bool:
    """Return whether kernels on the device of x can start before the kernel before them has ended."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def processors(device: torch.device) -> int:
    """Return the number of the GPU's streaming multiprocessors."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def ceil_div(total: int, part: int) -> int:
    return -(-total // part)


def operator(like: Callable[..., Any], mutates: Sequence[str] = (), schema: str | None = None) -> Callable[[F], F]:
    """Make a function that launches kernels the operator ``gac::<name>`` of GPUs, which compiled code can hold.

    ``like`` returns empty tensors like the results, of the same arguments; ``mutates`` names the arguments that are
    written to; the schema is by default that of the annotations.
    """

    def register(launch: F) -> F:
        name = launch.__name__
        inferred = schema or library.infer_schema(launch, mutates_args=mutates).replace("SymInt", "int")
        library.define(f"gac::{name}", inferred)
        library.impl(f"gac::{name}", "CUDA", launch)
        library.register_fake(f"gac::{name}", like)
        packet = getattr(torch.ops.gac, name)

        @wraps(launch)
        def call(*inputs: Any) -> Any:
            return packet(*inputs)

        return cast(F, call)

    return register
