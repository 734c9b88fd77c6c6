"""Which GPU, driver and libraries: the fingerprint that a profile begins with."""

import ctypes
import datetime
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

import gac
from gac.errors import ProfileError
from gac.profiling.folders import saved_folder, saved_profiles, shipped_profiles
from gac.profiling.records import SCHEMA, Header
from gac.profiling.timing import METHOD

_backends: Any = torch.backends  # its functions carry no annotations


def fingerprint() -> Header:
    """The header of a profile measured here and now, on the current CUDA device.

    Raises:
        ProfileError: there is no CUDA device, or ``nvidia-smi`` does not answer.
    """
    require_gpu()
    properties = torch.cuda.get_device_properties()
    driver, sm_clock, memory_clock, power = _nvidia_smi(str(properties.uuid))
    return Header(
        schema_version=SCHEMA,
        gpu=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        sm_count=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        sm_clock_max_mhz=int(sm_clock),
        memory_clock_mhz=int(memory_clock),
        power_limit_w=None if power.startswith("[") else float(power),  # laptops answer [N/A]
        driver=driver,
        cuda=str(torch.version.cuda),
        cublas=_cublas_version(),
        cudnn=str(_backends.cudnn.version()),
        torch=torch.__version__,
        gac_version=gac.__version__,
        dtype_policy=_dtype_policy(),
        timing=METHOD,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    )


def require_gpu() -> None:
    """Refuse to go on without a CUDA device.

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


def slug(gpu: str) -> str:
    """The file stem of a GPU's profile: ``NVIDIA H100 80GB HBM3`` -> ``nvidia-h100-80gb-hbm3``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def default_path(gpu: str) -> Path:
    """Where a profile of this GPU is saved when no path is given."""
    return saved_folder() / f"{slug(gpu)}.jsonl"


def local_profile() -> Path | None:
    """The profile of the GPU in this machine: the saved one, else a shipped one of the same name, else None."""
    if not torch.cuda.is_available():
        return None
    stem = slug(torch.cuda.get_device_name())
    return next((path for path in (*saved_profiles(), *shipped_profiles()) if path.stem == stem), None)


def _nvidia_smi(uuid: str) -> list[str]:
    """Driver version, maximal SM and memory clock in MHz, power limit in W."""
    query = "driver_version,clocks.max.sm,clocks.max.mem,power.limit"
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as failure:
        raise ProfileError(
            f"nvidia-smi failed: {failure}",
            "its answer about the driver, the clocks and the power limit",
            "Run it by hand.",
        ) from failure
    return [field.strip() for field in answer.stdout.strip().split(",")]


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
