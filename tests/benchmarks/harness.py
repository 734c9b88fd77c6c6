"""What the benchmarks share: options, the machine that figures come from, their file, and measured plans of a model."""

import argparse
import copy
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

import gac
from gac.allocation.problem import Problem
from gac.core.distributed.ranks import ALONE
from gac.core.errors import BudgetError
from gac.core.io import atomic_path
from gac.forms.curvature.methods import Method
from gac.forms.curvature.metric import Moments
from gac.measurement.calibration import CalibrationRun, stream_moments
from gac.measurement.own_text import sampled_windows
from gac.measurement.samples import NEWS, SAMPLE_TEXTS, packaged_file
from gac.measurement.session import targeted_digest
from gac.measurement.text import SELF
from gac.models.families import family_of
from gac.models.loading import Loaded, load_model
from gac.models.sites import Weight
from gac.plan.plan import Plan
from tests.benchmarks.problems import measured_problem


def _texts(given: str) -> str | list[str]:
    return given.split(",") if "," in given else given


OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {"default": "smollm2"},
    "--calibration": {"type": _texts, "default": "wiki-sample:64x1024", "help": "several texts with commas between"},
    "--profile": {"default": "nvidia-h100-80gb-hbm3"},
    "--budgets": {"type": float, "nargs": "*", "default": [0.9, 0.8, 0.7, 0.6]},
    "--heal": {"type": int, "default": 0, "help": "tokens that compression trains on at the end"},
    "--refit": {"choices": ("residual", "update", "none"), "help": "of GAC's plans"},
    "--texts": {"nargs": "+", "default": list(SAMPLE_TEXTS), "help": "evaluated; ratio and fit are of the first"},
    "--windows": {"type": int, "help": "evaluation windows; all where not given"},
    "--output": {"type": Path, "required": True},
    "--seconds": {"type": float, "default": 150, "help": "the same command goes on after so many"},
    "--warm": {"type": int, "default": 0, "help": "processes that compile kernels first"},
    "--retry": {"action": "store_true", "help": "measure again what failed"},
    "--device": {"choices": ("cuda", "cpu"), "default": "cuda"},
}
SELF_WINDOWS, SELF_SEED = 32, 1
"""Windows of own text on which models are measured, and its seed."""
LAYERS = (4, 14, 26)
"""Of SmolLM2's, where single weights are looked at."""
OF_ONE_TEXT = ("--model", "--calibration", "--profile", "--windows", "--heal", "--output")
OF_A_STUDY = (*OF_ONE_TEXT, "--texts")


def options(description: str | None, *shared: str) -> argparse.ArgumentParser:
    """A parser with those of ``OPTIONS`` that are named."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in shared:
        parser.add_argument(name, **OPTIONS[name])
    return parser


def plain_name(given: str) -> str:
    """Of an absolute path what it ends with, for records that are read elsewhere; all else as it is."""
    return Path(given).name if given.startswith("/") else given


def machine() -> dict[str, Any]:
    """Where figures come from: command (of absolute paths the last part alone), GPU, versions and date."""
    given = map(plain_name, sys.argv[1:])
    versions = {"gac": gac.__version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    versions |= {"transformers": transformers.__version__, "numpy": np.__version__}
    return {
        "command": shlex.join(["python", f"tests/benchmarks/{Path(sys.argv[0]).name}", *given]),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}",
        "cores": os.cpu_count(),
        "versions": versions | {"python": platform.python_version()},
        "date": time.strftime("%Y-%m-%d"),
    }


def write(output: Path | None, **figures: Any) -> None:
    """The figures as JSON, with the machine; nothing where no file is asked for."""
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(output) as temporary:
            temporary.write_text(json.dumps(machine() | figures, indent=1) + "\n", encoding="utf-8")


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def seen_of_layers(model: Any, method: Method, *parts: Tensor) -> Iterator[tuple[Weight, tuple[Moments, ...]]]:
    """Each weight of ``LAYERS``, the last layer first, with what each part of the text shows of it.

    Args:
        parts: token ids, shape ``(windows, tokens)``.
    """
    sites = [site for site in family_of(model.config).sites(model.config) if site.layer >= min(LAYERS)]
    for found in zip(*(stream_moments(CalibrationRun(model, ids, method), sites) for ids in parts), strict=True):
        layer = found[0][0]
        for weight in (one for site in sites if site.layer == layer and layer in LAYERS for one in site.weights):
            yield weight, tuple(moments.of(weight, method.pooled) for _, moments in found)


def problem_of(loaded: Loaded, **options: Any) -> Problem:
    """A model's loss curves beside a latency table, as ``gac.allocate`` has them with these options."""
    return measured_problem(loaded.model, loaded.tokenizer, 1.0, progress=True, **BASIS | LEAST_LOSS | options)


def news() -> Path:
    """All of the text of ``news-sample``."""
    return packaged_file(NEWS, "news")


BASIS = {"rotate": False}
"""Models are measured in the basis that they were loaded in, unless a study asks for another."""

LEAST_LOSS = {"fuse": False, "latency": "any", "slack": 0}
"""Options of plans that give nothing for speed."""


def own_text(loaded: Loaded, path: Path) -> Path:
    """A file of text that the dense model writes with another seed than that of calibration."""
    if not path.exists():
        model, tokenizer = loaded.model, loaded.tokenizer
        digest = targeted_digest(loaded, family_of(model.config).sites(model.config))
        windows = sampled_windows(model, tokenizer, digest, SELF_SEED, ALONE, True, SELF_WINDOWS, 1024)
        path.write_text("\n\n".join(tokenizer.batch_decode(windows.ids, skip_special_tokens=False)))
    return path


class Study:
    """Plans of one model, each compressed and measured; written after each, and the same command goes on there.

    Args:
        asked: the options of ``OF_A_STUDY``, or of ``OF_ONE_TEXT`` for the first of these texts alone; and ``length``
            of the evaluation where there is such.
        settings: further options that decide the figures. A file that was measured with others is refused.
        speed: whether plans give loss for speed, as by default.
    """

    def __init__(self, asked: argparse.Namespace, *settings: str, speed: bool = False) -> None:
        self._asked, self._options = asked, {} if speed else LEAST_LOSS
        self.texts: Sequence[str] = getattr(asked, "texts", SAMPLE_TEXTS[:1])
        self.loaded = load_model(asked.model)
        self._profile = gac.Profile.load(asked.profile)
        named = {name: getattr(asked, name) for name in ("model", "calibration", "windows", "heal", *settings)}
        named |= {
            "texts": list(map(plain_name, self.texts)),
            "model": plain_name(asked.model),
            "profile": Path(asked.profile).name,
        }
        named |= {name: machine()[name] for name in ("device", "versions")} | {"dtype": str(self.loaded.model.dtype)}
        self.settings: dict[str, Any] = json.loads(json.dumps(named))
        self.record = self._resumed()
        self.rows: list[dict[str, Any]] = self.record["rows"]
        for protocol, dense in zip(self.record["protocols"], self.record["denses"].values(), strict=True):
            print(f"dense perplexity {dense:.4f}: {protocol}")

    def _resumed(self) -> dict[str, Any]:
        """What was measured before, or a new record with the dense perplexities; ``dense`` is the first of them."""
        if not self._asked.output.exists():
            found = self._perplexities(self.loaded.model)
            first, denses = next(iter(found.values())), {name: one.value for name, one in found.items()}
            protocols = {"protocol": first.protocol, "protocols": [one.protocol for one in found.values()]}
            return {"settings": self.settings, **protocols, "dense": first.value, "denses": denses, "rows": []}
        found: dict[str, Any] = json.loads(self._asked.output.read_text())
        if found.get("settings") != self.settings:
            raise SystemExit(f"{self._asked.output} was measured with {found.get('settings')}, not {self.settings}")
        return found

    def add(self, labels: dict[str, Any], budget: float, **options: Any) -> dict[str, Any] | None:
        """The row of a plan, or why there is none; None where it was measured before.

        Args:
            labels: of the row.
            options: of ``gac.allocate``; None leaves one out.
        """
        given = {name: value for name, value in options.items() if value is not None}
        case = json.loads(json.dumps(labels | {"budget": budget} | given))
        known = [name for name in case if name != "latency"]  # which the row has as it was measured
        if any(all(row.get(name) == case[name] for name in known) for row in self.rows):
            return None
        fixed = {"profile": self._profile, "calibration": self._asked.calibration, "tokenizer": self.loaded.tokenizer}
        begun = time.monotonic()
        try:
            plan = gac.allocate(self.loaded.model, budget, **(BASIS | fixed | self._options | given))
        except BudgetError as failure:
            return self.keep(case | {"refused": str(failure)})
        row = case | self.measured(plan)
        return self.keep(row | {"seconds": time.monotonic() - begun})

    def measured(self, plan: Plan) -> dict[str, Any]:
        """What the model of a plan is, its predicted ln(ratio), and its quality."""
        return {
            "refit": plan.recipe.refit,
            "kept": plan.budget.kept,
            "used": plan.budget.used,
            "limit": plan.budget.limit,
            "over": plan.budget.over,
            "cache": plan.kv_numbers[0] / plan.kv_numbers[1],
            "aligned": plan.aligned_fraction,
            "misaligned": 1 - plan.aligned_fraction,
            "alignment": plan.alignment,
            "certificate": plan.certificate.status,
            "latency": {
                one.workload: one.plan_ns / one.dense_ns for one in plan.workloads if one.plan_ns and one.dense_ns
            },
            "predicted": plan.prediction.loss,
            "predicted_by_text": {by.text: by.loss for by in plan.prediction.by_text},
        } | self.quality_of(plan)

    def quality_of(self, plan: Plan) -> dict[str, Any]:
        """Of the model that is compressed by it."""
        loaded = self.loaded
        model = copy.deepcopy(loaded.model)
        return self.quality(gac.compress(model, plan, tokenizer=loaded.tokenizer, heal=self._asked.heal))

    def quality(self, model: Any) -> dict[str, Any]:
        """Perplexity over the dense model's.

        ``perplexity``, ``ratio`` and ``measured``, ln(ratio), are of the first text; ``losses`` has ln(ratio) on each,
        and ``mean_ratio`` is the geometric mean of the ratios.
        """
        values = {name: one.value for name, one in self._perplexities(model).items()}
        losses = {name: math.log(value / self.record["denses"][name]) for name, value in values.items()}
        perplexity, measured = (next(iter(each.values())) for each in (values, losses))
        of_first = {"perplexity": perplexity, "ratio": math.exp(measured), "measured": measured}
        return of_first | {"losses": losses, "mean_ratio": math.exp(fmean(losses.values()))}

    def _perplexities(self, model: Any) -> dict[str, gac.Perplexity]:
        """On each text, by its name."""
        asked = self._asked
        how = {"windows": asked.windows} | ({"length": asked.length} if "length" in asked else {})
        own = asked.output.with_suffix(".self.txt")
        files = {text: str(own_text(self.loaded, own)) if text == SELF else text for text in self.texts}
        return {text: gac.perplexity(model, self.loaded.tokenizer, file, **how) for text, file in files.items()}

    def keep(self, row: dict[str, Any], **summary: Any) -> dict[str, Any]:
        """Write one more row, and what is now to be said of all of them."""
        self.rows.append(row)
        self.record |= summary
        write(self._asked.output, **self.record)
        named = {name: value for name, value in row.items() if not isinstance(value, list)}
        shown = {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in named.items()}
        print(" ".join(f"{name}={value}" for name, value in shown.items()), flush=True)
        return row
