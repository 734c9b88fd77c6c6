"""Whether one process and several make the same plan, and the same one again.

    python tests/benchmarks/processes.py --ranks 1 2 4 --output processes.json
    python tests/benchmarks/processes.py --ranks 1 2 4 --calibration wiki-sample:16x512 --windows 40 --output cpu.json

torchrun starts ``gac allocate`` and ``gac compress`` in so many processes, each number with a home of its own, and the
last of them twice. ``alike`` is the share of the weights whose form and dims are those of the first number's plan.
``predicted`` is the plan's loss, ``ratio`` the perplexity over the dense model's. ``same`` says of the second turn
whether plan and tensors are those of the first, bit for bit.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gac
from gac.models.loading import Loaded, load_model
from tests.benchmarks.harness import markdown, options, write


def main() -> None:
    parser = options(__doc__, "--model", "--calibration", "--profile", "--refit", "--windows", "--output")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes")
    parser.add_argument("--budget", type=float, default=0.8)
    asked = parser.parse_args()
    loaded, rows, plans = load_model(asked.model), [], []
    dense = perplexity(loaded.model, loaded, asked.windows)
    with tempfile.TemporaryDirectory(prefix="gac-processes-") as name:
        for turn, count in enumerate([*asked.ranks, asked.ranks[-1]]):
            folder = Path(name) / f"{turn}"
            run(asked, count, folder)
            plans.append(gac.Plan.load(folder / "plan.json"))
            small = gac.load(folder / "small")
            rows.append(
                {
                    "processes": count,
                    "alike": alike(plans[0], plans[-1]),
                    "predicted": plans[-1].prediction.loss,
                    "ratio": perplexity(small, loaded, asked.windows) / dense,
                }
            )
            if turn == len(asked.ranks):
                rows[-1]["same"] = same(folder, Path(name) / f"{turn - 1}")
            write(asked.output, dense=dense, rows=rows)
    columns = ("processes", "alike", "predicted", "ratio", "same")
    print(markdown(columns, [[str(row.get(name, "")) for name in columns] for row in rows]))


def run(asked: Any, count: int, folder: Path) -> None:
    """Plan and compress in so many processes."""
    (folder / "home").mkdir(parents=True)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
    given = ("--budget", str(asked.budget), "--calibration", asked.calibration, "--profile", asked.profile)
    refit = ("--refit", asked.refit) if asked.refit else ()
    plan = ("allocate", asked.model, *given, *refit, "-o", str(folder / "plan.json"))
    small = ("compress", asked.model, "--plan", str(folder / "plan.json"), "-o", str(folder / "small"))
    for command in (plan, small):
        environment = os.environ | {"GAC_HOME": str(folder / "home")}
        subprocess.run((*torchrun, "-m", "gac", *command, "-q"), check=True, env=environment)


def perplexity(model: Any, loaded: Loaded, windows: int | None) -> float:
    return gac.perplexity(model, loaded.tokenizer, windows=windows).value


def alike(one: gac.Plan, other: gac.Plan) -> float:
    """The share of weights of the same form and dims."""
    pairs = list(zip(one.weights, other.weights, strict=True))
    return sum((a.form, a.dim) == (b.form, b.dim) for a, b in pairs) / len(pairs)


def same(folder: Path, before: Path) -> bool:
    """Whether two directories have the same plan and the same tensors."""
    one, other = (
        [file.read_bytes() for file in (place / "plan.json", *sorted(place.glob("small/*.safetensors")))]
        for place in (folder, before)
    )
    return one == other


if __name__ == "__main__":
    main()
