"""gate and up of many tokens on one GPU: cuBLAS and the activation beside GAC's one launch, microseconds.

    python tests/benchmarks/many_rows.py --output many-rows.json

Each runs for a third of a second, so that clocks have settled, in turns, twice; the shorter time counts. Both give the
same numbers, else it stops.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gac.runtime.kernels.elementwise.engine import gate
from gac.runtime.kernels.gated import gated_gemm
from tests.benchmarks.harness import options, write

SHAPES = [(8192, 2560), (8192, 8192), (8192, 14336), (2048, 8192), (1024, 8192), (512, 8192)]
INPUTS, SECONDS, TURNS = 4096, 0.35, 2


def microseconds(launches: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the least mean time of each over the turns, at steady clocks."""
    times: dict[str, list[float]] = {name: [] for name in launches}
    for _ in range(TURNS):
        for name, launch in launches.items():
            once = _mean(launch, 3)
            count = max(3, int(SECONDS / once))
            _mean(launch, count // 2)
            times[name].append(1e6 * _mean(launch, count))
    return {name: min(each) for name, each in times.items()}


def _mean(launch: Callable[[], Any], count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    launch()
    start.record()
    for _ in range(count):
        launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count / 1e3


def main() -> None:
    output = options(__doc__, "--output").parse_args().output
    results = {}
    for tokens, neurons in SHAPES:
        x = torch.randn(tokens, INPUTS, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(2 * neurons, INPUTS, device="cuda", dtype=torch.bfloat16) / INPUTS**0.5
        both = x.new_empty(tokens, 2 * neurons)
        library, gac = x.new_empty(tokens, neurons), x.new_empty(tokens, neurons)

        def apart(x: Any = x, weight: Any = weight, both: Any = both, out: Any = library) -> None:
            torch.mm(x, weight.t(), out=both)
            gate(both, out)

        launches: dict[str, Callable[[], Any]] = {
            "cublas": lambda x=x, weight=weight, both=both: torch.mm(x, weight.t(), out=both),
            "cublas, activation": apart,
            "gac": lambda x=x, weight=weight, out=gac: gated_gemm(x, weight, out),
        }
        for launch in launches.values():
            launch()
        torch.testing.assert_close(gac, library, rtol=2**-7, atol=1e-6)
        results[f"{tokens}x{neurons}"] = cells = microseconds(launches)
        print(f"| {tokens:,} | {neurons:,} | {' | '.join(f'{each:,.0f}' for each in cells.values())} |", flush=True)
    write(output, microseconds=results)


if __name__ == "__main__":
    main()
