"""GPU, driver and libraries: the fingerprint at the start of a profile."""

import ctypes
import datetime
import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gac.errors import ProfileError
from gac.profiling.folders import saved_folder, saved_profiles, shipped_profiles
from gac.profiling.records import SCHEMA, Header
from gac.profiling.timing.sampling import METHOD
from gac.version import __version__

_backends: Any = torch.backends  # its functions carry no annotations

_LOOKS = 3
_LOOK_SECONDS = 0.3
_BUSY_PERCENT = 5


def fingerprint() -> Header:
    """The header of a profile measured here and now, on the current CUDA device.

    Raises:
        ProfileError: there is no CUDA device, or the driver does not answer.
    """
    require_gpu()
    properties: Any = torch.cuda.get_device_properties()
    card = _card(str(properties.uuid))
    return Header(
        schema_version=SCHEMA,
        gpu=properties.name,
        device=hashlib.sha256(str(properties.uuid).encode()).hexdigest()[:16],
        compute_capability=f"{properties.major}.{properties.minor}",
        sm_count=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        memory_bytes=properties.total_memory,
        shared_memory_bytes=properties.shared_memory_per_block_optin,
        sm_clock_max_mhz=card.sm_clock_max_mhz,
        memory_clock_mhz=card.memory_clock_mhz,
        power_limit_w=card.power_limit_w,
        driver=card.driver,
        cuda=str(torch.version.cuda),
        cublas=_cublas_version(),
        cudnn=str(_backends.cudnn.version()),
        torch=torch.__version__,
        gac_version=__version__,
        dtype_policy=_dtype_policy(),
        timing=METHOD,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        shared_with=card.shared_with,
    )


def require_gpu() -> str:
    """The name of the current CUDA device.

    Raises:
        ProfileError: there is none, with the profiles that can be used instead.
    """
    if not torch.cuda.is_available():
        raise ProfileError(
            f"no CUDA device is visible to PyTorch {torch.__version__}",
            "an NVIDIA GPU to measure",
            "Use a profile that was measured elsewhere: "
            + (", ".join(path.stem for path in shipped_profiles()) or "(none is shipped)")
            + ".",
        )
    return torch.cuda.get_device_name()


def slug(gpu: str) -> str:
    """The file stem of a GPU's profile: ``NVIDIA H100 80GB HBM3`` -> ``nvidia-h100-80gb-hbm3``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def default_path(gpu: str) -> Path:
    """Where a profile of this GPU is saved when no path is given."""
    return saved_folder() / f"{slug(gpu)}.jsonl"


def studies_path(gpu: str) -> Path:
    """Where the studies of this GPU are saved: apart, for allocation takes the file of the GPU's own name."""
    return saved_folder() / f"{slug(gpu)}-studies.jsonl"


def local_profile() -> Path | None:
    """The profile of the GPU in this machine: the saved one, else a shipped one of the same name, else None."""
    if not torch.cuda.is_available():
        return None
    stem = slug(torch.cuda.get_device_name())
    return next((path for path in (*saved_profiles(), *shipped_profiles()) if path.stem == stem), None)


@dataclass(frozen=True)
class _Card:
    """What the driver reports; clocks in MHz, power in W (None where a laptop's driver does not report it)."""

    driver: str
    sm_clock_max_mhz: int
    memory_clock_mhz: int
    power_limit_w: float | None
    shared_with: str


def _card(uuid: str) -> _Card:
    import pynvml

    with _driver():
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        try:
            power = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
        except pynvml.NVMLError_NotSupported:
            power = None
        return _Card(
            str(pynvml.nvmlSystemGetDriverVersion()),
            int(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            int(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
            power,
            _others(
                [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)],
                [_utilization(handle) for _ in range(_LOOKS)],
            ),
        )


def _utilization(handle: Any) -> int:
    """Percent of the last moments in which a kernel ran."""
    import pynvml

    time.sleep(_LOOK_SECONDS)
    return int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)


def _others(pids: list[int], utilization: list[int]) -> str:
    """Who else uses the GPU, in words; empty if nobody does.

    A driver outside a container may know this process by another number, so if it is not among them, one of them is it.
    """
    others = len([pid for pid in pids if pid != os.getpid()])
    if others and os.getpid() not in pids:
        others -= 1
    busy = min(utilization)
    found = [f"{others} other process{'es' if others > 1 else ''} on it"] if others else []
    found += [f"busy {busy} % of the time while this process was idle"] if busy > _BUSY_PERCENT else []
    return ", ".join(found)


@contextmanager
def _driver() -> Iterator[None]:
    """The driver's management library, its failures in words.

    Raises:
        ProfileError: it does not answer.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            yield
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as failure:
        raise ProfileError(
            f"the NVIDIA driver does not answer: {failure}",
            "the driver's version, the clocks and the power limit",
            "Run nvidia-smi by hand.",
        ) from failure


def _cublas_version() -> str:
    """Version of the cuBLAS that PyTorch has loaded; ``unknown`` where the library has another name."""
    try:
        library = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).split('.')[0]}")
    except OSError:
        return "unknown"
    parts = []
    for field in range(3):
        value = ctypes.c_int()
        library.cublasGetProperty(field, ctypes.byref(value))
        parts.append(str(value.value))
    return ".".join(parts)


def _dtype_policy() -> str:
    matmul = torch.backends.cuda.matmul
    return (
        f"allow_bf16_reduced_precision_reduction={matmul.allow_bf16_reduced_precision_reduction}, "
        f"allow_fp16_reduced_precision_reduction={matmul.allow_fp16_reduced_precision_reduction}"
    )
