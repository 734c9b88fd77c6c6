"""Several processes measure, plan and compress as one does; what one of them meets ends all."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import gac
from gac.measurement.store import read_arrays
from tests.distributed import work
from tests.distributed.herd import LAYERS, Ended, together
from tests.healing.trained import TOKENS


@dataclass(frozen=True)
class Left:
    """What the processes of a run left."""

    folder: Path
    homes: Path

    def plan(self, name: str, rank: int = 0) -> gac.Plan:
        return gac.Plan.load(self.folder / str(rank) / f"{name}.json")

    def compressed(self, name: str, rank: int = 0) -> dict[str, Any]:
        return dict(torch.load(self.folder / str(rank) / f"{name}.pt", weights_only=False))

    def files(self, time: str, start: str) -> list[Path]:
        return sorted(next((self.homes / time / "statistics").iterdir()).glob(f"{start}*.safetensors"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, prose: str) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text(prose, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Left, Left]:
    """What one process and what two leave."""
    base, found = tmp_path_factory.mktemp("both"), []
    for count in (1, 2):
        left = Left(base / f"left-{count}", base / f"home-{count}")
        ended = together(count, work.plan_and_compress, left.homes, text, left.folder)
        assert ended == Ended([0] * count, [""] * count, [""] * count)
        found.append(left)
    return found[0], found[1]


def test_two_processes_find_what_one_finds(both: tuple[Left, Left]) -> None:
    one, two = both
    check_alike(one.files("first", "losses-"), two.files("first", "losses-"))
    plans = one.plan("plan"), two.plan("plan")
    pairs = list(zip(*(plan.weights for plan in plans), strict=True))
    assert sum((own.form, own.dim) == (other.form, other.dim) for own, other in pairs) >= 0.95 * len(pairs)
    assert plans[1].prediction.loss == pytest.approx(plans[0].prediction.loss, rel=5e-3)
    assert plans[1].certificate.status == "optimal"
    for name in ("fitted", "rounded"):
        ours, theirs = (left.compressed(name) for left in both)
        assert float((theirs["logits"] - ours["logits"]).abs().max()) <= 5e-3 * float(ours["logits"].abs().max())


def test_every_process_has_the_plan_and_the_model_and_rank_0_writes_it(both: tuple[Left, Left]) -> None:
    _, two = both
    assert two.plan("plan", 1) == two.plan("plan", 0)
    for name in ("fitted", "rounded"):
        lead, other = two.compressed(name, 0), two.compressed(name, 1)
        assert (other["digest"], other["plan"]) == (lead["digest"], lead["plan"])
    with torch.no_grad():
        logits = gac.load(two.folder / "fitted")(input_ids=torch.arange(64)[None] % 250).logits
    assert torch.equal(logits, two.compressed("fitted")["logits"])


def check_alike(ours: list[Path], theirs: list[Path]) -> None:
    """The same losses, up to rounding."""
    assert [path.name for path in ours] == [path.name for path in theirs]
    for own, other in zip(map(read_arrays, ours), map(read_arrays, theirs), strict=True):
        assert own.keys() == other.keys()
        for name, losses in own.items():
            assert losses == pytest.approx(other[name], rel=1e-4, abs=1e-9)


def test_two_processes_find_what_latents_lose_together(text: Path, tmp_path: Path) -> None:
    found = []
    for count in (1, 2):
        home = tmp_path / f"home-{count}"
        ended = together(count, work.plan_latents, home, text, tmp_path)
        assert ended == Ended([0] * count, [""] * count, [""] * count)
        found.append(sorted(next((home / "statistics").iterdir()).glob("whole-*.safetensors")))
    check_alike(*found)
    assert all(len(read_arrays(path)["summed"]) for path in chain(*found))
    lead, other = (gac.Plan.load(tmp_path / f"plan-{rank}.json") for rank in range(2))
    assert other == lead
    assert lead.prediction.together


def test_two_processes_predict_the_loss_by_text_as_one_does(text: Path, tmp_path: Path) -> None:
    losses = []
    for count in (1, 2):
        ended = together(count, work.plan_two_texts, tmp_path / f"home-{count}", text, tmp_path)
        assert ended == Ended([0] * count, [""] * count, [""] * count)
        losses.append([by.loss for by in gac.Plan.load(tmp_path / "plan-0.json").prediction.by_text])
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert gac.Plan.load(tmp_path / "plan-1.json") == gac.Plan.load(tmp_path / "plan-0.json")


def test_as_many_processes_find_the_same_bits_again(both: tuple[Left, Left]) -> None:
    _, two = both
    for start in ("layer-", "losses-kfac-standard", "factors-kfac-standard"):
        first, second = (two.files(time, start) for time in ("first", "second"))
        assert len(first) == LAYERS
        assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_two_processes_heal_one_model_whole_or_in_parts(text: Path, tmp_path: Path) -> None:
    home, left, well = tmp_path / "home", tmp_path / "left", Ended([0, 0], ["", ""], ["", ""])
    codes = together(2, work.heal, home, text, left).codes
    assert 3 in codes
    assert set(codes) <= {1, 3}  # one that sees the other's death first ends with an error
    assert len(list((home / "healing").iterdir())) == 1
    assert together(2, work.go_on_healing, home, text, left) == well
    assert not list((home / "healing").iterdir())
    whole, parts = (
        [torch.load(left / f"{rank}/{name}.pt", weights_only=False) for rank in range(2)] for name in ("whole", "parts")
    )
    assert whole[1]["digest"] == whole[0]["digest"]
    assert parts[1]["digest"] == parts[0]["digest"]
    [healed], [in_parts] = whole[0]["healed"], parts[0]["healed"]
    assert healed.after < healed.before
    assert healed.tokens >= TOKENS
    assert in_parts.after == pytest.approx(healed.after, rel=1e-4)
    assert in_parts.tokens == healed.tokens


def test_a_killed_process_is_named_and_the_run_resumes_with_another_number(
    text: Path, tmp_path: Path, both: tuple[Left, Left]
) -> None:
    home, folder = tmp_path / "home", tmp_path / "left"
    ended = together(2, work.die, home, text, 1)
    assert ended.codes == [1, -9]
    assert re.fullmatch(r"Error: rank 1 of 2 \(process .* is gone: .*\n", ended.errors[0])
    finished = sorted(home.glob("statistics/*/losses-*"))
    assert {path.stem[-4:] for path in finished} >= {"0002", "0003"}
    assert [read_arrays(path)["layer"] for path in home.glob("statistics/*/boundary*")] == [2]
    before = [path.stat().st_mtime_ns for path in finished]
    folder.mkdir()
    assert together(3, work.plan, home, text, folder) == Ended([0] * 3, [""] * 3, [""] * 3)
    assert [path.stat().st_mtime_ns for path in finished] == before
    plans = [gac.Plan.load(folder / f"plan-{rank}.json") for rank in range(3)]
    assert plans[1:] == plans[:1] * 2
    check_alike(sorted(home.glob("statistics/*/losses-*")), both[0].files("second", "losses-kfac-standard"))
    assert not list(home.glob("statistics/*/boundary*"))


def test_rank_0_says_what_another_process_met(text: Path, tmp_path: Path) -> None:
    ended = together(2, work.err, tmp_path / "home", text, 1)
    assert ended == Ended([1, 1], ["Error: a made-up fault; expected none. Do nothing.\n", ""], ["", ""])


def test_the_command_line_under_torchrun(directory: Path, text: Path, tmp_path: Path) -> None:
    """Rank 0 alone speaks and writes."""
    plan = tmp_path / "plan.json"
    allocate = ("allocate", directory, "--calibration", f"{text}:4x64", "--profile", "nvidia-h100-80gb-hbm3")
    done = torchrun(*allocate, "--budget", "0.7", "--json", "-o", plan)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == str(plan)
    assert done.stderr.count("saved as") == 1


def torchrun(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gac")
    environment = os.environ | {"PYTHONPATH": str(Path(gac.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
