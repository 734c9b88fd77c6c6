"""What the benchmarks that measure many plans of one model read it with."""

import platform
from typing import Any

import torch

import gac
from gac import api
from gac.allocation.assemble import Provenance
from gac.allocation.problem import Problem
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


def measured(
    loaded: Loaded, calibration: str, profile: str, workload: str, refit: str | None = "none"
) -> tuple[Problem, Provenance]:
    """A model's loss curves beside a latency table, as ``gac.allocate`` has them for ``kfac`` and its forms."""
    return api._measured(
        loaded.model,
        loaded.tokenizer,
        refit=refit,
        budget=1.0,
        profile=profile,
        method="kfac",
        forms=("low_rank", "narrow"),
        workloads=(workload,),
        calibration=calibration,
        align=True,
        fuse=False,
        seed=0,
        progress=True,
    )
