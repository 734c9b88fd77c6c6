"""Linear weights and low-rank pairs of one row: the Triton kernel of ``gac.runtime.decode_kernel`` beside cuBLAS.

    python tests/benchmarks/decode_kernels.py --output decode_kernels.json

Llama-3-8B's shapes, bf16, cold caches, CUDA graphs, medians as ``gac profile`` takes them, results checked against
float32. Both take turns, three each; the fastest and the slowest turn are written down.
"""

from statistics import geometric_mean, median

from gac.core.operations import Operation, linear
from gac.forms.low_rank.spec import low_rank
from gac.profiling.operators import with_decode_kernel
from gac.profiling.records import Point
from gac.profiling.timing.device import fingerprint
from gac.profiling.timing.measure import GpuMeasurer
from tests.benchmarks.harness import options, write

SHAPES = ((4096, 1024), (4096, 4096), (4096, 14336), (14336, 4096))
FUSED = ((4096, 6144), (4096, 28672))
RANKS = (256, 512, 1024, 1536, 2048)
TURNS = 3


def main() -> None:
    asked = options(__doc__, "--output").parse_args()
    measurer = GpuMeasurer(fingerprint())
    pairs = [low_rank(1, k, r, n) for k, n in SHAPES for r in RANKS if r * (k + n) < k * n]
    rows = [row(measurer, one) for one in (*(linear(1, k, n) for k, n in (*SHAPES, *FUSED)), *pairs)]
    for operator in ("linear", "low_rank"):
        gains = [one["cublas_us"] / one["triton_us"] for one in rows if one["operator"] == operator]
        mean, least, most = geometric_mean(gains), min(gains), max(gains)
        print(f"{operator}: cuBLAS / Triton, geometric mean {mean:.3f}, {least:.3f} to {most:.3f}")
    write(asked.output, rows=rows)


def row(measurer: GpuMeasurer, operation: Operation) -> dict:
    """Microseconds of both, in ``TURNS`` turns."""
    turns = [(timed(measurer, operation), timed(measurer, with_decode_kernel(operation))) for _ in range(TURNS)]
    cublas, triton = zip(*turns, strict=True)
    first, second = median(cublas), median(triton)
    shape = " -> ".join(f"{operation.axes[axis]:5}" for axis in ("k", "r", "n") if axis in operation.axes)
    print(f"{shape:24} cuBLAS {first:6.2f} us  Triton {second:6.2f} us  {first / second:.2f}x", flush=True)
    found = {"operator": operation.operator, **operation.axes, "cublas_us": first, "triton_us": second}
    return found | {"cublas_turns_us": [min(cublas), max(cublas)], "triton_turns_us": [min(triton), max(triton)]}


def timed(measurer: GpuMeasurer, operation: Operation) -> float:
    found = measurer.measure(Point(operation, "bf16"))
    assert found.median_ns is not None, found.error
    return found.median_ns / 1000


if __name__ == "__main__":
    main()
