"""How much GAC holds: a profile of a million rows, a plan of Llama-3-70B's size, a hundred plans side by side.

``python tests/benchmarks/load.py profile`` (or ``plan``, ``compare``) prints the seconds, those of CPU time, and the
most memory.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--passes", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        taken, what = CASES[asked.case](Path(folder), asked.rows, asked.passes)
    print(f"{what}: {taken}, {peak() / 1e9:.2f} GB")


def peak() -> int:
    """The most bytes that this program had in memory; ``ru_maxrss`` would count the process that started it too."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def timed(work: Callable[[], T]) -> tuple[str, T]:
    """Seconds in words, of the clock on the wall and of this process's work; and what came of it."""
    wall, used = time.perf_counter(), time.process_time()
    result = work()
    return f"{time.perf_counter() - wall:.2f} s, {time.process_time() - used:.2f} s of CPU time", result


def profile(folder: Path, rows: int, passes: int) -> tuple[str, str]:
    """Open a profile of so many rows; each has its own shape, and one of some thousand grids."""
    from gac.profiling.table import Profile

    path = folder / "large.jsonl"
    write_profile(path, rows, passes)
    taken, found = timed(lambda: Profile.load(path))
    assert len(found.measurements) == rows
    return taken, f"a profile of {rows:,} rows, {passes} passes, {path.stat().st_size / 1e6:.0f} MB, opened"


def plan(*_: object) -> tuple[str, str]:
    """Choose for a model of Llama-3-70B's shape: 80 layers of 7 weights, every multiple of 8 as a rank."""
    import gac
    from tests.benchmarks.bench_knapsack import llama

    groups, limits = llama("llama-3-70b", 8, 0.8)
    candidates = sum(len(group.values) for group in groups)
    taken, solution = timed(lambda: gac.knapsack(groups, limits=limits))
    assert solution.certificate.status == "optimal"
    return taken, f"a choice for {len(groups)} sites among {candidates:,} candidates, proved optimal"


def compare(folder: Path, *_: object) -> tuple[str, str]:
    """``gac compare`` over a hundred plans of 560 weights."""
    from transformers import LlamaConfig

    from tests.cli.commands import run
    from tests.fixtures import _make_plan

    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    )
    for number in range(100):
        changes = {f"model.layers.{at}.self_attn.q_proj": ("low_rank", 8 * (number + 1)) for at in range(80)}
        _make_plan(config, changes).save(folder / f"{number}.json")
    taken, done = timed(lambda: run("compare", *sorted(folder.glob("*.json"))))
    assert done.exit_code == 0, done.output
    return taken, "100 plans of 560 weights compared"


CASES = {"profile": profile, "plan": plan, "compare": compare}


def write_profile(path: Path, rows: int, passes: int) -> None:
    from tests.headers import MACHINE

    with path.open("w") as file:
        file.write(json.dumps({"record": "header", "header": MACHINE}, separators=(",", ":")) + "\n")
        for kernel in range(64):
            line = {"record": "kernel", "name": f"nvjet_sm90_tst_{kernel}", "block": [384, 1, 1], "shared_bytes": 0}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        for row in range(rows):
            file.write(_row(row))
        for _ in range(passes - 1):
            for row in range(rows):
                file.write(f'{{"record":"again","row":{row},"median_ns":{20_000 + row % 977}}}\n')


def _row(row: int) -> str:
    """As ``gac profile`` writes it."""
    shape = f'{{"m":1024,"k":{4096 + row // 5000},"n":{1 + row % 5000}}}'
    timing = f'"median_ns":{20_000 + row % 1009}.5,"iqr_ns":{row % 211}.25,"samples":10,"sm_clock_mhz":1935'
    launch = f"[[{row % 64},{1 + row % 5000},8,1]]"
    return (
        f'{{"record":"row","operator":"linear","shape":{shape},"dtype":"bf16","cache":"cold",{timing},'
        f'"converged":true,"launches":{launch}}}\n'
    )


if __name__ == "__main__":
    main()
