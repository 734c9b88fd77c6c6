"""The work of each process in tests of several; some time collectives of gloo on a GPU that is made up of this CPU."""

import copy
import hashlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import gac
from gac.core.distributed import launch, ranks
from gac.core.distributed.run import this_run
from gac.core.errors import ModelError
from gac.forms.latent import Latent
from gac.healing import gradients as module
from gac.healing import heal as of_healing
from gac.healing import run
from gac.healing.gradients import Capturing, Gradients
from gac.healing.losses import mean_loss
from gac.measurement import calibration, curves, sums
from gac.models.digests import bytes_of
from gac.profiling.operators import operation, runner_of
from gac.profiling.records import Point
from gac.profiling.sweeps import collectives
from gac.profiling.timing import measure, stopwatch
from gac.profiling.timing.operands import Pools
from gac.testing.models import tiny_model
from tests.distributed.herd import TABLE, llama, options
from tests.headers import make_header
from tests.healing.trained import Trained, trained

_one_window_at_a_time = patch.object(sums, "CPU_TOKENS", 1)
"""Then any number of processes multiplies the same matrices: neurons that are nearly tied show the last bits."""


def digest_of(model: Any) -> str:
    digest = hashlib.sha256()
    for name, values in model.state_dict().items():
        digest.update(name.encode())
        digest.update(bytes_of(values))
    return digest.hexdigest()


@_one_window_at_a_time
def plan_and_compress(text: Path, folder: Path) -> None:
    """A plan of many forms, and in another home two compressed models; every process leaves what it has."""
    folder = folder / str(launch.rank())
    folder.mkdir(parents=True)
    home = os.environ["GAC_HOME"]
    os.environ["GAC_HOME"] = f"{home}/first"
    gac.allocate(llama(), 0.7, forms=("low_rank", "narrow", "skip", "heads"), **options(text)).save(
        folder / "plan.json"
    )
    os.environ["GAC_HOME"] = f"{home}/second"
    for name, given in {"fitted": {}, "rounded": {"schemes": ("w8a16",), "memory": 0.4, "refit": "none"}}.items():
        model = llama()
        planned = gac.allocate(model, 0.7, **given, **options(text))
        small = gac.compress(model, planned, tokenizer=options(text)["tokenizer"], progress=False)
        ids = torch.arange(64)[None] % 250
        with torch.no_grad():
            held = {"logits": small(input_ids=ids).logits, "digest": digest_of(small), "plan": planned}
        torch.save(held, folder / f"{name}.pt")
        gac.save(small, folder.parent / name, tokenizer=options(text)["tokenizer"])


@_one_window_at_a_time
def plan_two_texts(text: Path, folder: Path) -> None:
    """A plan from two texts, of which the shorter counts more; every process leaves its own."""
    backwards = folder / f"backwards-{launch.rank()}.txt"
    backwards.write_text(text.read_text("utf-8")[::-1], encoding="utf-8")
    shared = this_run().once(lambda: backwards)
    texts = [f"{text}:6x64", f"{shared}:2x64"]
    plan = gac.allocate(llama(), 0.7, balance="mean", **options(text) | {"calibration": texts})
    plan.save(folder / f"plan-{launch.rank()}.json")


def heal(text: Path, folder: Path) -> None:
    """A model that has learned something is compressed, and healed on the text; then in parts, up to a fifth state."""
    found, small, folder = _to_be_healed(text, folder)
    _healed(found, copy.deepcopy(small), folder / "whole.pt")
    write, left = run.DistillationRun.checkpoint, [5]

    def then_gone(self: Any, *given: Any) -> None:
        write(self, *given)
        for values in (self.initial, self.best):  # what is kept of them is in parts, too
            assert sum(one.numel() for one in values.values()) < 0.6 * self.trainables.count
        left[0] -= 1
        if not left[0]:
            os._exit(3)

    often = patch.multiple(run, INTERVAL=0.0, TIME_SHARE=1e9)
    with often, patch.object(run.DistillationRun, "checkpoint", then_gone):
        _heal_in_parts(found, small, folder)


def go_on_healing(text: Path, folder: Path) -> None:
    """The same again, in parts alone, from there to the end."""
    resume = run.DistillationRun.start_or_resume

    def further_on(self: Any) -> None:
        resume(self)
        assert self.progress.layers
        assert self.progress.steps

    with patch.object(run.DistillationRun, "start_or_resume", further_on):
        _heal_in_parts(*_to_be_healed(text, folder))


def _heal_in_parts(found: Trained, small: Any, folder: Path) -> None:
    with patch.object(of_healing, "needs_sharding", return_value=True):
        _healed(found, small, folder / "parts.pt")


def _to_be_healed(text: Path, folder: Path) -> tuple[Trained, Any, Path]:
    folder = folder / str(launch.rank())
    folder.mkdir(parents=True, exist_ok=True)
    found = replace(trained(folder), text=text)
    few_bits = {"schemes": ("bf16", "w2a16:32"), "budget": 1.0, "memory": 0.3, "rotate": False}
    return found, found.compressed(**few_bits, workloads=(), profile=TABLE), folder


def _healed(found: Trained, small: Any, path: Path) -> None:
    healed = found.heal(small, text=str(found.text))
    torch.save({"digest": digest_of(healed), "healed": healed.gac_plan.healed}, path)


@_one_window_at_a_time
def plan(text: Path, folder: Path) -> None:
    _keep_boundaries_alone()
    gac.allocate(llama(), 0.7, **options(text)).save(folder / f"plan-{launch.rank()}.json")


def plan_latents(text: Path, folder: Path) -> None:
    """A plan of a smaller cache, of a model that loses so little that it is measured where next to nothing is lost."""
    with patch.object(Latent, "loss", replace(Latent.loss, anchors=(1e-6, 1e-5))):
        asked = options(text) | {"forms": ("latent",), "kv_cache": 0.5, "refit": "none"}
        gac.allocate(llama(), 1.0, **asked).save(folder / f"plan-{launch.rank()}.json")


@_one_window_at_a_time
def die(text: Path, rank: int) -> None:
    """One of them is killed as it works on its second layer."""
    _keep_boundaries_alone()
    _at_second_layer(rank, lambda: os.kill(os.getpid(), signal.SIGKILL))
    gac.allocate(llama(), 0.7, **options(text))


def err(text: Path, rank: int) -> None:
    """One of them meets an error that the others do not."""

    def refuse() -> None:
        raise ModelError("a made-up fault", "none", "Do nothing.")

    _at_second_layer(rank, refuse)
    gac.allocate(llama(), 0.7, **options(text))


def _keep_boundaries_alone() -> None:
    """A snapshot after every turn and no moments, as of a large model that is measured for long."""
    calibration.SNAPSHOT_SECONDS, calibration.LAYER_BYTES = 0.0, 0


def _at_second_layer(rank: int, happens: Any) -> None:
    if launch.rank() != rank:
        return
    fit, layers = curves.fit_layer, []

    def fit_or_not(*given: Any) -> Any:
        layers.append(given)
        if len(layers) == 2:
            happens()
        return fit(*given)

    curves.fit_layer = fit_or_not  # type: ignore[assignment]


POINTS = [
    Point(operation(name, gpus=2, m=m, n=n))
    for name, shapes in {"all_reduce": [(3, 64)], "all_gather": [(1, 16), (3, 64)], "reduce_scatter": [(3, 64)]}.items()
    for m, n in shapes
]


class Event:
    """Now; it has come too early, or not, by chance, and in each process otherwise, as on real GPUs.

    Were processes to decide from their own samples, they would soon wait for each other for ever.
    """

    dice = random.Random(1)

    def __init__(self, enable_timing: bool) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return self.dice.random() < 0.1

    def elapsed_time(self, later: "Event") -> float:
        return max(1e3 * (later._at - self._at), 1e-3)


class Graph:
    """Runs again what it has captured."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._calls = calls

    def replay(self) -> None:
        for call in self._calls:
            call()


class Stopwatch(stopwatch.Stopwatch):
    """The real one, with the parts of a GPU that are made up."""

    def _capture(self, calls: Sequence[Callable[[], object]]) -> Any:
        return Graph(calls)


@contextmanager
def _at_once(_stream: object) -> Iterator[None]:
    yield


def _on_cpu(make: Callable[..., torch.Tensor], *given: Any, **how: Any) -> torch.Tensor:
    return make(*given, **how | {"device": "cpu"})


def make_up() -> None:
    """Let this process see a GPU; that of rank r has r as the last digit of its number."""
    rank = launch.rank()
    Event.dice = random.Random(rank)
    on_cpu = {name: partial(_on_cpu, getattr(torch, name)) for name in ("ones", "empty", "zeros")}
    cuda = SimpleNamespace(
        Event=Event,
        Stream=lambda: SimpleNamespace(synchronize=lambda: None),
        stream=_at_once,
        _sleep=lambda _cycles: None,
        graph_pool_handle=lambda: None,
        empty_cache=lambda: None,
        mem_get_info=lambda: (2**24 + 4096 * rank, 2**24),
        synchronize=lambda: None,
    )
    stopwatch._cuda = measure._cuda = cuda
    stopwatch.torch = SimpleNamespace(**on_cpu, cuda=cuda, sum=torch.sum, float32=torch.float32, int32=torch.int32)
    stopwatch._WARM_UP_SECONDS = 0.0
    measure.torch = SimpleNamespace(cuda=cuda)
    measure.Stopwatch = Stopwatch
    measure.Pools = lambda _device, limit: Pools("cpu", limit)
    header = collectives.replace(make_header(), device=f"{rank:016}", l2_bytes=4096)
    collectives.fingerprint = lambda: header
    collectives.uuid = lambda: str(rank)
    collectives.link_between = lambda uuids: "NVLink" if uuids == ["0", "1"] else "?"


def sweep(path: Path) -> None:
    """The all-gather of several rows is wrong in one process."""
    _at_gather(lambda result: [one if len(one) == 1 else torch.zeros_like(one) for one in result])
    collectives.profile_collectives(POINTS, path, passes=2)


def fail_on_one(path: Path) -> None:
    def fail(_result: object) -> Any:
        raise RuntimeError("a fault")

    _at_gather(fail)
    collectives.profile_collectives(POINTS, path, passes=1)


def _at_gather(happens: Callable[[Any], Any]) -> None:
    """What happens to the results of all-gathers in the process of rank 1."""
    make_up()
    runner = runner_of("all_gather")
    if launch.rank() == 1:
        run = runner.run
        runner.run = lambda *given: happens(run(*given))


def every_check(folder: Path) -> None:
    share_heldout_windows()
    average_once()
    capture(folder)
    average(folder)


def average(folder: Path) -> None:
    """Gradients of two parts of a batch, and means of tensors of two dtypes."""
    ours = this_run()
    weight, bias = (nn.Parameter(torch.zeros(size)) for size in ((4, 3), (4,)))
    gradients = Gradients(lambda ids: (ids @ weight.T + bias).sum(), [weight, bias], Capturing(False), ours)
    parts = [torch.full((2, 3), 1.0 + ours.rank), torch.full((1, 3), 10.0 * ours.rank)]
    losses = [float(gradients.add(part, last=part is parts[-1]).detach()) for part in parts]
    assert losses == [0, 0]
    ranks.BUCKET_BYTES = 24
    mixed = [torch.full(size, float(ours.rank), dtype=dtype) for size, dtype in SIZES]
    ours.average(mixed)
    assert [tensor.shape for tensor in mixed] == [torch.Size(size) for size, _ in SIZES]
    torch.save([weight.grad, bias.grad, *mixed], folder / f"averaged-{ours.rank}.pt")


def capture(folder: Path) -> None:
    """Passes that both processes can capture, and then others that the second one cannot."""
    ours, weight, capturing = this_run(), nn.Parameter(torch.zeros(3)), Capturing(True)

    class Captured:
        def __init__(self, run: Any, inputs: Any) -> None:
            if ours.rank and len(inputs[0]) > 2:
                raise RuntimeError("no room")
            self.run = lambda inputs: run(*inputs)

    module._CapturedPass = Captured  # type: ignore[assignment, misc]
    gradients = Gradients(lambda rows: (rows @ weight).sum(), [weight], capturing, ours)
    means = []
    for rows in (2, 3, 3):
        weight.grad = None
        gradients.zero()
        gradients.add(torch.full((rows, 3), 1.0 + ours.rank))
        assert weight.grad is not None
        means.append(weight.grad.tolist())
    torch.save((means, capturing.enabled), folder / f"captured-{ours.rank}.pt")


def average_once() -> None:
    """Average one pass after another; a pass after that is not averaged."""
    ours, weight = this_run(), nn.Parameter(torch.zeros(2))
    for _ in range(2):
        weight.grad = None
        with ours.averaging([weight]):
            (weight * ours.rank).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [0.5, 0.5]
    (weight * ours.rank).sum().backward()
    assert weight.grad.tolist() == [0.5 + ours.rank] * 2


def share_heldout_windows() -> None:
    """The loss on windows that both processes share, and the passes of each."""
    ours, dense, small = this_run(), tiny_model(), tiny_model()
    with torch.no_grad():
        small.lm_head.weight.mul_(2)
    windows = torch.randint(dense.config.vocab_size, (5, 16), generator=torch.Generator().manual_seed(0))
    labels, runs = torch.linspace(0, 1, 5), []
    small.register_forward_hook(lambda *_arguments: runs.append(1))
    for batch, passes in ((1, 3), (2, 2), (5, 1)):
        alone = mean_loss(small, dense, windows, batch, labels)
        runs.clear()
        assert mean_loss(small, dense, windows, batch, labels, ours) == alone
        assert len(runs) == passes


SIZES = [((2, 2), torch.float32), ((3,), torch.float64), ((2,), torch.float32), ((), torch.float32)]
SIZES += [((9,), torch.float32), ((1,), torch.float64)]
