"""GPU, driver and libraries: the fingerprint at the start of a profile."""

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
        dtype_policy=_dtype_policy(),
        timing=METHOD,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        triton=_triton_version(),
        **_card(uuid()),
    )


def require_gpu(otherwise: str | None = None) -> str:
    """The name of the current CUDA device.

    Args:
        otherwise: what can be done where there is none; None: use a profile of those that are shipped.

    Raises:
        ProfileError: there is none.
    """
    if not torch.cuda.is_available():
        shipped = ", ".join(path.stem for path in shipped_profiles()) or "(none is shipped)"
        raise ProfileError(
            f"no CUDA device is visible to PyTorch {torch.__version__}",
            "an NVIDIA GPU to measure",
            otherwise or f"Use a profile that was measured elsewhere: {shipped}.",
        )
    return torch.cuda.get_device_name()


def uuid() -> str:
    """The serial number of the current CUDA device, as the driver knows it."""
    properties: Any = torch.cuda.get_device_properties()
    return str(properties.uuid)


def link_between(uuids: Sequence[str]) -> str:
    """How GPUs of this host reach each other: ``NVLink`` if each reaches every other so, else ``PCIe``.

    Raises:
        ProfileError: the driver does not answer.
    """
    import pynvml

    with _driver("how the GPUs reach each other"):
        handles = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{one}") for one in uuids]
        linked = [
            pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == pynvml.NVML_P2P_STATUS_OK
            for one, other in permutations(handles, 2)
        ]
    return "NVLink" if all(linked) else "PCIe"


@contextmanager
def _driver(asked: str) -> Iterator[None]:
    """Ask the driver for something.

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
            f"the NVIDIA driver does not answer: {failure}", asked, "Run nvidia-smi by hand."
        ) from failure


def _card(serial: str) -> dict[str, Any]:
    """The fields of the header that the driver reports; a laptop's driver reports no power limit.

    Raises:
        ProfileError: it does not answer.
    """
    import pynvml

    power = None
    with _driver("the driver's version, the clocks and the power limit"):
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{serial}")
        with suppress(pynvml.NVMLError_NotSupported):
            power = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
        pids = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        return {
            "driver": str(pynvml.nvmlSystemGetDriverVersion()),
            "sm_clock_max_mhz": int(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            "memory_clock_mhz": int(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
            "power_limit_w": power,
            "shared_with": _others(pids, [_utilization(handle) for _ in range(_LOOKS)]),
        }


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


def _cublas_version() -> str:
    """Version of the cuBLAS that PyTorch has loaded; ``unknown`` where the library has another name."""
    try:
        library = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).split('.')[0]}")
    except OSError:
        return "unknown"
    parts = [ctypes.c_int() for _ in range(3)]
    for field, part in enumerate(parts):
        library.cublasGetProperty(field, ctypes.byref(part))
    return ".".join(str(part.value) for part in parts)


def _triton_version() -> str | None:
    """Version of the Triton that compiles GAC's kernels; None where there is none."""
    try:
        return str(import_module("triton").__version__)
    except ImportError:
        return None


def _dtype_policy() -> str:
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    return ", ".join(f"{name}={getattr(torch.backends.cuda.matmul, name)}" for name in names)
