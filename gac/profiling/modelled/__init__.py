"""Latencies of shapes that a table lacks: a roofline fitted to its rows, and what they say beyond."""

from gac.profiling.modelled.model import GpuModel
from gac.profiling.modelled.roofline import Gpu

__all__ = ["Gpu", "GpuModel"]
