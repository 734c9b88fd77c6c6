"""Break a real GPU in the middle of a sweep, in every way that a program can, and resume.

    python -m tests.benchmarks.gpu_faults --output gpu-faults.json

Each fault befalls one shape of a small sweep in a process of its own, for a failed device is gone for its process. Then
the same sweep is run again, without the fault. Printed is how the first run ended, what the shape's row says after
each, and how many timings of the others the second run had to take again.
"""

import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from gac.core.errors import GacError
from gac.forms.low_rank import low_rank
from gac.profiling.operators import runner_of
from gac.profiling.records import Point
from gac.profiling.sweeps.sweep import run_sweep
from gac.profiling.table import Profile
from gac.profiling.timing.device import fingerprint, require_gpu
from gac.profiling.timing.measure import GpuMeasurer
from tests.benchmarks.harness import options, write

POINTS = [Point(low_rank(128, 1024, rank, 1024)) for rank in range(64, 512, 32)]
BAD = 256


def out_of_memory(_outputs: Sequence[torch.Tensor]) -> None:
    torch.empty(2**40, dtype=torch.uint8, device="cuda")


def wrong_result(outputs: Sequence[torch.Tensor]) -> None:
    for output in outputs:
        output.mul_(1.5)


def refused(outputs: Sequence[torch.Tensor]) -> None:
    torch.mm(outputs[0], outputs[0].T.float())


def device_assert(_outputs: Sequence[torch.Tensor]) -> None:
    torch.zeros(1, device="cuda")[torch.tensor([7], device="cuda")].sum()


FAULTS = {fault.__name__: fault for fault in (out_of_memory, wrong_result, refused, device_assert)}


def sweep(path: Path, fault: str = "") -> dict[str, object]:
    """How one run in this process ended; a fault befalls every launch of rank 256."""
    runner = runner_of("low_rank")
    run = runner.run

    def harmed(inputs, outputs):
        result = run(inputs, outputs)
        if any(BAD in tensor.shape for tensor in inputs):
            FAULTS[fault](outputs)
        return result

    if fault:
        runner.run = harmed
    header = fingerprint()
    try:
        timed = run_sweep(POINTS, path, GpuMeasurer(header), header, progress=False)
    except GacError as failure:
        return {"ended": f"{type(failure).__name__}: {failure.given}"}
    return {"ended": "done", "timed": timed}


def tried(fault: str, folder: Path) -> dict[str, object]:
    path = folder / f"{fault}.jsonl"
    first, again = (_in_a_process(path, one) for one in (fault, ""))
    rows = {row.shape["r"]: row for row in Profile.load(path).measurements}
    return {
        "first_run": first,
        "second_run": again,
        "row": rows[BAD].error,
        "others_timed": sum(len(row.passes) == 3 for rank, row in rows.items() if rank != BAD),
        "others": len(POINTS) - 1,
    }


def _in_a_process(path: Path, fault: str) -> object:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        ended = pool.submit(sweep, path, fault)
        return {"raw": repr(ended.exception())} if ended.exception() else ended.result()


def main() -> None:
    asked = options(__doc__, "--output").parse_args()
    require_gpu()
    with tempfile.TemporaryDirectory() as folder:
        found = {fault: tried(fault, Path(folder)) for fault in FAULTS}
    print(json.dumps(found, indent=2))
    write(asked.output, **found)


if __name__ == "__main__":
    main()
