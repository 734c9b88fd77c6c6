"""Problems of models as ``gac.allocate`` makes them."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gac.allocation.problem import Problem
from gac.allocation.resolve import resolve
from gac.api import Request
from gac.compression.first_shot import first_shot
from gac.measurement.session import measuring
from gac.models.loading import load_config
from gac.profiling.select import select_profile


def measured_problem(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None,
    budget: float,
    progress: bool = False,
    **options: Any,
) -> Problem:
    request = Request.parse(None, budget, options)
    profile, profile_used = select_profile(request.profile)
    resolved = resolve(request.recipe, load_config(model), profile, profile_used)
    opened = measuring(model, resolved, request.texts, tokenizer, first_shot=first_shot, progress=progress)
    with opened as measured_with:
        measured = measured_with(())
    return Problem(resolved.sites, measured.curves, profile, measured.recipe, measured.evidence, measured.by_weight)
