"""GEMMs with 1 to 64 rows on one GPU: cuBLAS beside the kernels that GAC runs in vLLM, microseconds in CUDA graphs.

    python tests/benchmarks/few_rows.py --output few-rows.json

Every launch reads another weight, 500 MB in all, so that none lies in L2. A ratio above 1 means that GAC is faster.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gac.runtime.kernels.few_rows import gated_row, multiply
from tests.benchmarks.harness import options, write

ROWS = (1, 2, 8, 16, 32, 64)
SHAPES = [
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (18432, 4096), (4096, 9216),
    (3072, 4096), (1024, 4096), (4096, 1024), (4096, 512), (896, 896), (896, 4864), (10240, 8192),
]  # fmt: skip
REPEATS, BYTES = 7, 500_000_000


def microseconds(launches: Sequence[Callable[[], Any]]) -> float:
    """Return the median time of a launch, of a graph of all of them."""
    stream, times = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        launches[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
        for _ in range(REPEATS + 1):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end))
    return 1000 * sorted(times[1:])[REPEATS // 2] / len(launches)


def timed(weights: Sequence[Tensor], rows: int) -> dict[str, float]:
    n, columns = weights[0].shape
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
    library = microseconds([lambda weight=weight: torch.mm(x, weight.t(), out=y) for weight in weights])  # type: ignore[misc]
    return {
        "cublas": library,
        "gac": microseconds([lambda weight=weight: multiply(x, weight, y) for weight in weights]),
    }  # type: ignore[misc]


def gated(weights: Sequence[Tensor]) -> float:
    n, columns = weights[0].shape
    x = torch.randn(1, columns, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(1, n // 2, device="cuda", dtype=torch.bfloat16)
    return microseconds([lambda weight=weight: gated_row(x, weight, y) for weight in weights])  # type: ignore[misc]


def main() -> None:
    output = options(__doc__, "--output").parse_args().output
    results: dict[str, Any] = {}
    for n, columns in SHAPES:
        count = max(6, min(48, BYTES // (2 * n * columns)))
        weights = [torch.randn(n, columns, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        cells = {rows: timed(weights, rows) for rows in ROWS}
        results[f"{n}x{columns}"] = {"gated": gated(weights), **cells}
        ratios = " | ".join(
            f"{cell['cublas']:.1f} / {cell['gac']:.1f} ({cell['cublas'] / cell['gac']:.2f}x)" for cell in cells.values()
        )
        print(f"| {n} x {columns} | {ratios} |", flush=True)
    write(output, microseconds=results)


if __name__ == "__main__":
    main()
