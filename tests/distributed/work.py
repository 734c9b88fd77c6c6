"""What the processes of a test do."""

import copy
import hashlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import gac
from gac.core.distributed import launch
from gac.core.errors import ModelError
from gac.forms.latent import Latent
from gac.healing import heal as of_healing
from gac.healing import run
from gac.measurement import calibration, curves
from gac.models.loading import bytes_of
from tests.distributed.herd import llama, options
from tests.healing.trained import Trained, trained


def digest_of(model: Any) -> str:
    digest = hashlib.sha256()
    for name, values in model.state_dict().items():
        digest.update(name.encode())
        digest.update(bytes_of(values))
    return digest.hexdigest()


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
    return found, found.compressed(schemes=("bf16", "w2a16:32"), budget=1.0, memory=0.3, rotate=False), folder


def _healed(found: Trained, small: Any, path: Path) -> None:
    healed = found.heal(small, text=str(found.text))
    torch.save({"digest": digest_of(healed), "healed": healed.gac_plan.healed}, path)


def plan(text: Path, folder: Path) -> None:
    _keep_boundaries_alone()
    gac.allocate(llama(), 0.7, **options(text)).save(folder / f"plan-{launch.rank()}.json")


def plan_latents(text: Path, folder: Path) -> None:
    """A plan of a smaller cache, of a model that loses so little that it is measured where next to nothing is lost."""
    with patch.object(Latent, "loss", replace(Latent.loss, anchors=(1e-6, 1e-5))):
        asked = options(text) | {"forms": ("latent",), "kv_cache": 0.5, "refit": "none"}
        gac.allocate(llama(), 1.0, **asked).save(folder / f"plan-{launch.rank()}.json")


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
