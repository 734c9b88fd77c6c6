"""What the benchmarks that measure many plans of one model read it with."""

import platform
from typing import Any

import torch

import gac
from gac.allocation.problem import Problem
from gac.measuring import Asked, measure_problem
from gac.models.loading import Loaded, load_model


def read(name: str) -> Loaded:
    """The model, with a tokenizer that cuts each text only once for all rows."""
    loaded = load_model(name)
    tokens: dict[str, Any] = {}

    def tokenizer(text: str, **options: Any) -> Any:
        if text not in tokens:
            tokens[text] = loaded.tokenizer(text, **options)
        return tokens[text]

    return load_model(loaded.model, tokenizer)


def machine() -> dict[str, Any]:
    """Where figures come from, as the results' headers say it."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}",
        "versions": {"gac": gac.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def measured(loaded: Loaded, calibration: str, profile: str, workload: str, refit: str | None = "none") -> Problem:
    """A model's loss curves beside a latency table, as ``gac.allocate`` has them for ``kfac`` and its forms."""
    options = {"calibration": calibration, "profile": profile, "workloads": [workload], "refit": refit}
    return measure_problem(loaded.model, Asked.of(None, 1.0, options), loaded.tokenizer, progress=True)
