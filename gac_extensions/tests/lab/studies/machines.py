"""Machines that never were: each gives every point a latency, from published figures or from a rule."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gac.profiling.operators import work_of
from gac.profiling.records import Launch, Measurement, Point
from gac_extensions.lab.studies import published

ALIGN8 = "ampere_fp16_s16816gemm_fp16_256x128_ldg8_f2f_stages_64x3_tn"
ALIGN8_XMMA = "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize192x128x32_stage3_warpsize4x2x1_tensor16x8x16_kernel"
ALIGN2 = "cutlass_80_tensorop_f16_s16816gemm_f16_256x128_32x3_tn_align2"
ALIGN1 = "cutlass_75_tensorop_f16_s1688gemm_f16_256x128_tn_align1"

Refusal = str
Answer = tuple[float | Refusal, str]
"""Milliseconds or the reason of a refusal, and the kernel that ran."""


@dataclass(frozen=True)
class Machine:
    answer: Callable[[Point], Answer]

    def __call__(self, point: Point) -> Measurement:
        value, kernel = self.answer(point)
        if isinstance(value, str):
            return Measurement.of(point, None, None, 0, None, False, error=value)
        ran = (Launch(kernel, (132, 1, 1), (384, 1, 1), 49152),)
        return Measurement.of(point, 1e6 * value, 0.0, 10, 1980, True, launches=ran)


def flops(point: Point) -> int:
    return work_of(point.operation, point.dtype)[0]


def flat(point: Point) -> Answer:
    """100 TFLOP/s whatever the shape, by one kernel; copies at 2 TB/s."""
    count, moved = work_of(point.operation, point.dtype)
    return (count / 1e11 or moved / 2e9), "one_kernel"


def a100(point: Point) -> Answer:
    """The published A100 (for INT4 the laptop, for head_dim 132 the H100).

    Sizes between the figures go by their alignment class; heads of different dims are made up.
    """
    operator, axes = point.operation.operator, point.operation.axes
    if operator.startswith("sdpa") and point.dtype == "fp16":
        return _a100_sdpa(operator, axes["d"])
    if point.dtype == "bf16":
        return _elsewhere(point), "one_kernel"
    if operator == "linear":
        return _a100_linear(point)
    if operator == "low_rank":
        return (0.1 if axes["r"] % 8 == 0 else 0.178), ALIGN8
    if operator == "batched_gemm_separate":
        return (1.6 if axes["low"] < axes["high"] else 1.2), ALIGN8
    return (1.2 if operator == "batched_gemm_bucketed" else 1.0), ALIGN8


def _a100_sdpa(operator: str, d: int) -> Answer:
    known = published.sdpa_ms("S1")
    if operator in {"sdpa_efficient", "sdpa_math", "sdpa_cudnn"}:
        backend = {"sdpa_efficient": "mem_efficient", "sdpa_math": "math"}.get(operator)
        rows = published.rows("a100_sdpa", study="S2", backend=str(backend))
        latency = {row.head_dim: row.latency_ms for row in rows}.get(d)
        return latency if latency is not None else f"{operator} does not take d = {d}", operator
    if operator == "sdpa_flash" and d % 8 == 0 and d != 112:
        tier = next(row for row in published.rows("a100_fa2_templates") if d <= row.high_inclusive)
        low, _, high = tier.latency_ms.partition("-")
        latency = float(low) if d < 208 or not high else float(high)
        return latency, f"flash_fwd_kernel<Flash_fwd_kernel_traits<{tier.high_inclusive}, 128, {tier.block_cols}, 4>"
    aligned = float(np.interp(-(-d // 8) * 8, [*known, 136, 160, 168, 256], [*known.values(), 2.0, 2.0, 2.3, 2.9]))
    return (known.get(d) or (aligned if d % 8 == 0 else 1.4 * aligned)), "flash"


def _a100_linear(point: Point) -> Answer:
    m, k, n = point.operation.axes.values()
    worst = k if k % 8 else n
    kernel = ALIGN1 if worst % 2 else ALIGN2 if worst % 8 else ALIGN8
    if m == 1:
        return 0.02 * (1.12 if k % 8 else 1.04 if n % 8 else 1.0), kernel
    if m == n == 8192:
        rate = {16: 91.1, 8: 76.8, 4: 66.0, 2: 52.0, 1: 38.5}[min(k & -k, 16)]
        return flops(point) / rate / 1e9, kernel
    if n == 2048:
        return (0.02, ALIGN8) if m <= 1728 else (0.026, ALIGN8_XMMA)
    return (0.05 if worst % 8 == 0 else 0.089), kernel


def _elsewhere(point: Point) -> float:
    operator, axes = point.operation.operator, point.operation.axes
    if operator == "copy":
        return work_of(point.operation, point.dtype)[1] / 2e8
    if axes.get("d") == 132 or axes.get("k", 1) % 132 == 0:
        return flops(point) / 219e9
    regimes = {(row.n, row.k, row.batch): row for row in published.rows("int4_gemv_regimes")}
    row = regimes.get((axes.get("n"), axes.get("k"), axes.get("m")))
    if row is None:
        return flops(point) / 370e9
    by_operator = {"int4_linear": 1.0, "int4_linear_dequantised": row.speedup_vs_two_op}
    return 1e-3 * row.fused_us * by_operator.get(operator, row.speedup_vs_fp16_gemm)
