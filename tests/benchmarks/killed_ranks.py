"""Kill one process of a run in each of its phases: what the others do, and what the next run makes of it.

    python tests/benchmarks/killed_ranks.py --ranks 2 4 --output killed-ranks.json
    python tests/benchmarks/killed_ranks.py --ranks 2 --tiny --output killed-ranks-cpu.json

``gac allocate``, ``compress`` and ``heal`` run once undisturbed. Then they run again in a home of their own, and in
each phase in turn the last process ends as by ``kill -9``, and the same command is started again: so each run goes on
where the one before was killed. ``gone`` is how many seconds later the last of the others has ended, and ``named``
whether an error said which process is missing. ``kept`` of ``finished`` is how many files of statistics that were there
when it was killed the next runs left as they were. ``same`` says of the end whether the plan and the tensors are those
of the undisturbed run, bit for bit. ``--ranks 1`` asks the same of one process.

Processes have torchrun's environment, but are not started by it, since it would end the others itself: ``--torchrun``
is for that. Snapshots and states of healing are written without a pause, so that a short run has some to go on from.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm import tqdm

from tests.benchmarks.harness import markdown, options, write
from tests.distributed.herd import together

COLUMNS = ("processes", "phase", "gone", "named", "finished", "kept", "said")


@dataclass(frozen=True)
class Phase:
    """Where a process is killed: at a call of a function.

    Attributes:
        name: of the phase.
        verbs: what runs, one after the other.
        module: where the function is.
        function: its name there.
        call: the number of the call, or of the call after one for every process.
    """

    name: str
    verbs: tuple[str, ...]
    module: str
    function: str
    call: int
    each: bool = False


PHASES = (
    Phase("forward", ("allocate",), "gac.models.layer_stack", "LayerStack.run", 3),
    Phase("backward, moments", ("allocate",), "gac.measurement.layerwise", "LayerwiseBackward.through", 1, True),
    Phase("decompositions", ("allocate",), "gac.measurement.curves", "fit_layer", 2),
    Phase("refitting", ("allocate", "compress"), "gac.compression.refit", "_LayerWork.run", 3),
    Phase("healing, layers", ("compress", "heal"), "gac.healing.optimizer", "RelativeAdamW.step", 4),
    Phase("healing, the whole model", ("heal",), "gac.healing.whole_model", "_Steps._add_gradients", 6),
)
"""In the order in which a run comes to them."""
REST = ("heal",)
LONGEST = 600.0
"""Seconds that a run may take."""


def main() -> None:
    parser = options(__doc__, "--model", "--profile", "--output")
    parser.add_argument("--calibration", default="wiki-sample:8x512")
    parser.add_argument("--budget", type=float, default=0.8)
    parser.add_argument("--tokens", type=int, default=65_536, help="to heal on")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of processes")
    parser.add_argument("--torchrun", action="store_true", help="started by it")
    parser.add_argument("--tiny", action="store_true", help="a random model, for a CPU")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    ends: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="gac-killed-") as name:
        base = Path(name)
        if asked.tiny:
            asked.model = str(tiny(base / "model", 4 * max(asked.ranks)))
        for count in asked.ranks:
            folder = base / str(count)
            whole = Runs(asked, count, folder / "undisturbed")
            seconds = whole.run(("allocate", "compress", "heal"))["seconds"]
            runs, end = harmed(Runs(asked, count, folder / "killed"))
            rows += runs
            end |= {"processes": count, "undisturbed": seconds, "same": same(whole.folder, folder / "killed")}
            ends.append(end)
            write(asked.output, asked=settings(asked), rows=rows, ends=ends)
    print(markdown(COLUMNS, [[str(row[name]) for name in COLUMNS] for row in rows]))
    print(json.dumps(ends, indent=1))


def settings(asked: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(asked).items() if not isinstance(value, Path) and name != "model"}


class Runs:
    """Runs of one number of processes, in a home of their own."""

    def __init__(self, asked: Any, count: int, folder: Path) -> None:
        self._asked, self.count, self.folder = asked, count, folder
        (folder / "home").mkdir(parents=True)

    def run(self, verbs: tuple[str, ...], phase: int | None = None) -> dict[str, Any]:
        """What rank 0 said of a run, and how it ended; with a phase one process is killed in it."""
        given = {"commands": [self._command(verb) for verb in verbs], "phase": phase, "folder": str(self.folder)}
        moment, begun = self.folder / "killed-at", time.monotonic()
        codes, said = (self._by_torchrun if self._asked.torchrun else self._by_hand)(json.dumps(given))
        found = {"seconds": round(time.monotonic() - begun, 1), "codes": codes, "said": said}
        if phase is None and any(codes):
            raise SystemExit(said)
        if phase is not None:
            assert moment.exists(), f"{PHASES[phase].name} was not come to: {said[-3000:]}"
            found["gone"] = round(time.time() - float(moment.read_text()), 2)
            moment.unlink()
        return found

    def files(self) -> dict[str, int]:
        """What is kept of the statistics, and when it was written."""
        found = (self.folder / "home").glob("statistics/*/*.safetensors")
        return {path.name: path.stat().st_mtime_ns for path in found if not path.name.startswith((".", "boundary"))}

    def _by_hand(self, given: str) -> tuple[list[int | None], str]:
        ended = together(self.count, work, self.folder / "home", given, seconds=LONGEST)
        return ended.codes, ended.errors[0]

    def _by_torchrun(self, given: str) -> tuple[list[int | None], str]:
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.count))
        command = (*torchrun, str(Path(__file__).resolve()), "--worker", given)
        environment = os.environ | {"GAC_HOME": str(self.folder / "home")}
        ended = subprocess.run(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )
        return [ended.returncode], ended.stderr

    def _command(self, verb: str) -> tuple[str, ...]:
        asked = self._asked
        plan, small, healed = (str(self.folder / name) for name in ("plan.json", "small", "healed"))
        if verb == "allocate":
            measured = ("--calibration", asked.calibration, "--profile", asked.profile)
            return (verb, asked.model, "--budget", str(asked.budget), *measured, "-o", plan)
        if verb == "compress":
            return (verb, asked.model, "--plan", plan, "-o", small, "--overwrite")
        return (verb, small, "--against", asked.model, "--tokens", str(asked.tokens), "-o", healed, "--overwrite")


def harmed(runs: Runs) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A run that is killed in each phase, and what came of it in the end."""
    rows, before = [], []
    for at, phase in enumerate(PHASES):
        found = runs.run(phase.verbs, at)
        before.append(runs.files())
        errors = [line for line in found["said"].splitlines() if line.startswith("Error: ")]
        named = any(line.startswith(f"Error: rank {runs.count - 1} of {runs.count} (process ") for line in errors)
        row = {"processes": runs.count, "phase": phase.name, "gone": found["gone"], "named": named}
        rows.append(row | {"finished": len(before[-1]), "codes": found["codes"], "said": " ".join(errors)})
        print(row, file=sys.stderr, flush=True)
    last = runs.run(REST)
    after = runs.files()
    for row, files in zip(rows, before, strict=True):
        row["kept"] = sum(after.get(name) == time for name, time in files.items())
    goes_on = [line for line in last["said"].splitlines() if "goes on" in line]
    return rows, {"went on": goes_on, "last run": last["seconds"]}


def tiny(folder: Path, layers: int) -> Path:
    """A small random model with a tokenizer, as a directory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from gac.testing.models import tiny_config, tiny_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(**tiny_config().to_dict() | {"num_hidden_layers": layers})
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def same(one: Path, other: Path) -> dict[str, bool]:
    """Whether two runs have the same plan and the same tensors."""
    found = {"plan": (one / "plan.json").read_bytes() == (other / "plan.json").read_bytes()}
    for name in ("small", "healed"):
        tensors = [[path.read_bytes() for path in sorted((at / name).glob("*.safetensors"))] for at in (one, other)]
        found[name] = bool(tensors[0]) and tensors[0] == tensors[1]
    return found


def work(asked: str) -> None:
    """What each process does."""
    from gac.cli import main as program
    from gac.core.distributed.run import this_run
    from gac.healing import run
    from gac.measurement import calibration

    given = json.loads(asked)
    tqdm.set_lock(threading.RLock())  # its own would be a semaphore that a killed process leaves behind
    calibration.SNAPSHOT_SECONDS = run.INTERVAL = 0.0
    run.TIME_SHARE = 1e9
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if given["phase"] is not None and rank == count - 1:
        fatal(PHASES[given["phase"]], count, Path(given["folder"]) / "killed-at")
    for command in given["commands"]:
        try:
            program.main(command)
        except SystemExit as ended:
            if ended.code:
                raise
        this_run().wait()  # rank 0 alone writes what the next one reads


def fatal(phase: Phase, count: int, moment: Path) -> None:
    """Let a call of the phase's function be this process's last."""
    owner: Any = importlib.import_module(phase.module)
    *inner, name = phase.function.split(".")
    for part in inner:
        owner = getattr(owner, part)
    function, calls = getattr(owner, name), 0

    def last(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == phase.call + phase.each * count:
            moment.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)

    setattr(owner, name, last)


if __name__ == "__main__":
    work(sys.argv[2]) if sys.argv[1:2] == ["--worker"] else main()
