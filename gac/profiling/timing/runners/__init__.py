"""How every operator runs with PyTorch; one runner a description in ``gac.profiling.operators``."""

from collections.abc import Mapping
from types import MappingProxyType

from gac.profiling.operators import OPERATORS
from gac.profiling.operators.attention import Sdpa
from gac.profiling.timing.runners.attention import SdpaRunner
from gac.profiling.timing.runners.base import WORST_ERROR, Result, Runner, relative_error
from gac.profiling.timing.runners.batched import BatchedRunner, HeadsRunner, SeparateHeadsRunner
from gac.profiling.timing.runners.gemm import (
    LinearRunner,
    LowRankRunner,
    SharedLowRankRunner,
    TritonLinearRunner,
    TritonLowRankRunner,
)
from gac.profiling.timing.runners.int4 import DequantisedInt4Runner, FusedInt4Runner
from gac.profiling.timing.runners.memory import CopyRunner

__all__ = ["RUNNERS", "WORST_ERROR", "Result", "Runner", "relative_error"]

_ALL: tuple[Runner, ...] = (
    LinearRunner(OPERATORS["linear"]),
    LinearRunner(OPERATORS["linear_rowwise"]),
    TritonLinearRunner(OPERATORS["linear_triton"]),
    LowRankRunner(OPERATORS["low_rank"]),
    TritonLowRankRunner(OPERATORS["low_rank_triton"]),
    SharedLowRankRunner(OPERATORS["low_rank_shared"]),
    BatchedRunner(OPERATORS["batched_gemm"]),
    SeparateHeadsRunner(OPERATORS["batched_gemm_separate"]),
    HeadsRunner(OPERATORS["batched_gemm_bucketed"]),
    HeadsRunner(OPERATORS["batched_gemm_padded"]),
    FusedInt4Runner(OPERATORS["int4_linear"]),
    DequantisedInt4Runner(OPERATORS["int4_linear_dequantised"]),
    *(SdpaRunner(operator) for operator in OPERATORS.values() if isinstance(operator, Sdpa)),
    CopyRunner(OPERATORS["copy"]),
)

RUNNERS: Mapping[str, Runner] = MappingProxyType({runner.operator.name: runner for runner in _ALL})
