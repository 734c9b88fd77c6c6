"""Running a command as a user would, and a small recorded profile to run it on."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from gac.cli import main
from gac.profiling.operators import operation
from gac.profiling.records import Point
from tests.headers import MACHINE

KERNELS = (
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNN",
    "cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_64x3_tn_align2>",
    "cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>",
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """What is said where the command ends with an error of the user's."""
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    return result.stderr


def answer(*arguments: object) -> dict[str, Any]:
    """What the command prints with ``--json``: one document, and nothing beside it."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def hopper(dim: int) -> int:
    """The kernel at a dim, which also says how slow it is: 1x, 2.5x, 5x."""
    return 0 if dim % 8 == 0 else 1 if dim % 2 == 0 else 2


def ranks(dims: Iterable[int] = range(960, 1089)) -> list[Point]:
    return [Point(operation("low_rank", m=1024, k=4096, r=rank, n=4096)) for rank in dims]


def write_profile(path: Path, points: Iterable[Point], moved: Callable[[Point], int]) -> Path:
    """A profile of these points; ``moved`` names the dim that decides kernel and latency."""
    lines: list[dict[str, Any]] = [{"record": "header", "header": MACHINE}]
    lines += [{"record": "kernel", "name": name, "block": [384, 1, 1], "shared_bytes": 0} for name in KERNELS]
    for point in points:
        kernel = hopper(moved(point))
        ns = (20_000 + 10 * moved(point)) * (1.0, 2.5, 5.0)[kernel]
        row = {"record": "row", "operator": point.operation.operator, "shape": point.operation.axes}
        row |= {"dtype": point.dtype, "cache": point.cache, "median_ns": ns, "iqr_ns": 0.001 * ns, "samples": 10}
        launches = [[kernel, 132, 1, 1]] * (2 if point.operation.operator == "low_rank" else 1)
        lines.append(row | {"sm_clock_mhz": 1980, "converged": True, "launches": launches})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
