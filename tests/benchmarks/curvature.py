"""What other ways to take the curvature win: a second shot, and labels drawn from the model (the sampled Fisher).

    python tests/benchmarks/curvature.py --calibration wiki-sample:190x1024 --only "two shots" --output shots.json

``two shots``: the statistics are taken on the model compressed to ``--first`` (its weights multiplied out again), and
the dense model is planned and compressed with them. ``sampled``: the loss whose gradients are taken is that of labels
drawn from the model itself. ``one shot`` is what GAC does. Each way keeps its statistics in a folder of its own.
"""

import argparse
import copy
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from reading import read
from torch import Tensor
from torch.nn.functional import cross_entropy

import gac
from gac.files import atomic_path, home
from gac.models.loading import Loaded, load_model
from gac.sensitivity.calibration import stream_moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--calibration", default="wiki-sample:64x1024")
    parser.add_argument("--profile", default="nvidia-h100-80gb-hbm3")
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.8, 0.6])
    parser.add_argument("--first", type=float, default=0.8, help="kept fraction of the first shot")
    parser.add_argument("--only", choices=tuple(WAYS), action="append", help="repeatable; all by default")
    parser.add_argument("--windows", type=int, help="evaluation windows; all where not given")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    loaded = read(asked.model)
    dense = gac.perplexity(loaded.model, loaded.tokenizer, windows=asked.windows)
    print(f"dense {dense}")
    rows: list[dict[str, Any]] = []
    for way in asked.only or WAYS:
        with WAYS[way](loaded, asked):
            for budget in asked.budgets:
                for refit in ("none", "residual"):
                    rows.append({"way": way} | measured(loaded, budget, refit, asked, dense.value))
                    print(rows[-1], flush=True)
                    write(asked, dense, rows)


def write(asked: argparse.Namespace, dense: gac.Perplexity, rows: list[dict[str, Any]]) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    head = {"model": asked.model, "calibration": asked.calibration, "protocol": dense.protocol, "first": asked.first}
    head |= {"device": device, "torch": torch.__version__, "gac": gac.__version__, "dense": dense.value}
    with atomic_path(asked.output) as temporary:
        temporary.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


def measured(
    loaded: Loaded, budget: float, refit: str, asked: argparse.Namespace, dense: float
) -> dict[str, float | str]:
    compressed, plan = made(loaded, budget, refit, asked)
    found = gac.perplexity(compressed, loaded.tokenizer, windows=asked.windows)
    ratio = found.value / dense
    return {
        "budget": budget,
        "refit": refit,
        "ratio": ratio,
        "measured": math.log(ratio),
        "predicted": plan.prediction.loss,
    }


def made(loaded: Loaded, budget: float, refit: str, asked: argparse.Namespace) -> tuple[Any, gac.Plan]:
    plan = gac.allocate(
        loaded.model,
        budget,
        profile=asked.profile,
        refit=refit,
        calibration=asked.calibration,
        tokenizer=loaded.tokenizer,
    )
    return gac.compress(copy.deepcopy(loaded.model), plan, tokenizer=loaded.tokenizer), plan


@contextmanager
def one_shot(_loaded: Loaded, _asked: argparse.Namespace) -> Iterator[None]:
    yield


@contextmanager
def two_shots(loaded: Loaded, asked: argparse.Namespace) -> Iterator[None]:
    """Statistics of the same windows in the model that the first shot makes, as dense as the one that is planned."""
    compressed, _ = made(loaded, asked.first, "residual", asked)
    with tempfile.TemporaryDirectory() as folder:
        gac.export(compressed, Path(folder) / "first", merge=True)
        like = loaded.model
        first = load_model(Path(folder) / "first", loaded.tokenizer, device=like.device, dtype=like.dtype).model

    def moments(_model: Any, *arguments: Any, **options: Any) -> Any:
        return stream_moments(first, *arguments, **options)

    with own_statistics(), mock.patch("gac.sensitivity.curves.stream_moments", moments):
        yield


@contextmanager
def sampled(_loaded: Loaded, _asked: argparse.Namespace) -> Iterator[None]:
    """Labels drawn from the model's own distribution, one for each token (K-FAC, arXiv 1503.05671, section 5)."""
    torch.manual_seed(0)

    def drawn(logits: Tensor, _labels: Tensor, reduction: str) -> Tensor:
        labels = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
        return cross_entropy(logits, labels, reduction=reduction)

    with own_statistics(), mock.patch("gac.sensitivity.losses.cross_entropy", drawn):
        yield


@contextmanager
def own_statistics() -> Iterator[None]:
    """A GAC_HOME with the texts of this one, and no statistics."""
    with tempfile.TemporaryDirectory() as folder:
        if (home() / "text").is_dir():
            shutil.copytree(home() / "text", Path(folder) / "text")
        with mock.patch.dict(os.environ, {"GAC_HOME": folder}):
            yield


WAYS: dict[str, Callable[[Loaded, argparse.Namespace], Any]] = {
    "one shot": one_shot,
    "two shots": two_shots,
    "sampled": sampled,
}


if __name__ == "__main__":
    main()
