"""GPU, driver and libraries: the header of a profile."""

import ctypes
import datetime
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import permutations
from typing import Any

import torch

from gac.core.errors import ProfileError
from gac.core.version import __version__
from gac.profiling.folders import shipped_profiles
from gac.profiling.records import SCHEMA, Header
from gac.profiling.timing.sampling import METHOD

_backends: Any = torch.backends  # its functions carry no annotations

_properties: Any = torch.cuda.get_device_properties
_SAMPLES = 3
_SAMPLE_SECONDS = 0.3
_BUSY_PERCENT = 5
_POLICIES = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


def fingerprint() -> Header:
    require_gpu()
    properties = _properties()
    return Header(
        schema_version=SCHEMA,
        gpu=properties.name,
        device=hashlib.sha256(str(properties.uuid).encode()).hexdigest()[:16],
        compute_capability=f"{properties.major}.{properties.minor}",
        sm_count=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        memory_bytes=properties.total_memory,
        shared_memory_bytes=properties.shared_memory_per_block_optin,
        cuda=str(torch.version.cuda),
        cublas=_cublas_version(),
        cudnn=str(_backends.cudnn.version()),
        torch=str(torch.__version__),
        gac_version=__version__,
        dtype_policy=", ".join(f"{name}={getattr(torch.backends.cuda.matmul, name)}" for name in _POLICIES),
        timing=METHOD,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        triton=_triton_version(),
        **_driver_fields(uuid()),
    )


def require_gpu(otherwise: str | None = None) -> str:
    if not torch.cuda.is_available():
        shipped = ", ".join(path.stem for path in shipped_profiles()) or "(none is shipped)"
        raise ProfileError(
            f"no CUDA device is visible to PyTorch {torch.__version__}",
            "an NVIDIA GPU to measure",
            otherwise or f"Use a profile that was measured elsewhere: {shipped}.",
        )
    return torch.cuda.get_device_name()


def uuid() -> str:
    return str(_properties().uuid)


def link_between(uuids: Sequence[str]) -> str:
    import pynvml

    with _driver("the link between the GPUs"):
        handles = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{serial}") for serial in uuids]
        states = [
            pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
            for first, second in permutations(handles, 2)
        ]
    return "NVLink" if all(state == pynvml.NVML_P2P_STATUS_OK for state in states) else "PCIe"


@contextmanager
def _driver(expected: str) -> Iterator[None]:
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            yield
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as failure:
        problem = f"the NVIDIA driver does not answer: {failure}"
        raise ProfileError(problem, expected, "Run nvidia-smi by hand.") from failure


def _driver_fields(serial: str) -> dict[str, Any]:
    import pynvml

    power = None
    with _driver("the driver's version, the clocks and the power limit"):
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{serial}")
        with suppress(pynvml.NVMLError_NotSupported):
            power = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
        pids = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        utilization = []
        for _ in range(_SAMPLES):
            time.sleep(_SAMPLE_SECONDS)
            utilization.append(int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu))
        return {
            "driver": str(pynvml.nvmlSystemGetDriverVersion()),
            "sm_clock_max_mhz": int(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            "memory_clock_mhz": int(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
            "power_limit_w": power,
            "shared_with": _other_users(pids, utilization),
        }


def _other_users(pids: list[int], utilization: list[int]) -> str:
    """Describe the other users of the GPU; empty if there are none.

    A driver outside a container may know this process by another number, so if it is not among them, one of them is it.
    """
    others = len([pid for pid in pids if pid != os.getpid()])
    if others and os.getpid() not in pids:
        others -= 1
    busy = min(utilization)
    words = [f"{others} other process{'es' if others > 1 else ''} on it"] if others else []
    words += [f"busy {busy} % of the time while this process was idle"] if busy > _BUSY_PERCENT else []
    return ", ".join(words)


def _cublas_version() -> str:
    try:
        library = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).split('.')[0]}")
    except OSError:
        return "unknown"
    parts = [ctypes.c_int() for _ in range(3)]
    for field, part in enumerate(parts):
        library.cublasGetProperty(field, ctypes.byref(part))
    return ".".join(str(part.value) for part in parts)


def _triton_version() -> str | None:
    try:
        return str(import_module("triton").__version__)
    except ImportError:
        return None
