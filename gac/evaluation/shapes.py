"""A model of known shapes without weights: random ones to run, and another model's loss curves to plan with."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from gac.allocation.problem import Problem
from gac.evaluation.versions import Planner
from gac.models.families import family_of
from gac.models.shapes import Shapes, shapes_of
from gac.plan import Measured
from gac.profiling.select import select_profile
from gac.recipe import Recipe
from gac.sensitivity.curve_library import CurveLibrary
from gac.workloads import Workload

_AutoConfig: Any = transformers.AutoConfig
_AutoModel: Any = transformers.AutoModelForCausalLM
_POSITIONS = 131_072
_VOCABULARY = 32_000
_VOCABULARIES: Mapping[str, int] = MappingProxyType(
    {"smollm2": 49_152, "llama-3-8b": 128_256, "llama-3-70b": 128_256, "qwen3-8b": 151_936, "gemma-3-4b": 262_208}
)


def planner_of_shapes(
    name: str,
    workloads: Sequence[Workload],
    profile: str | Path | None = None,
    layers: int | None = None,
    library: CurveLibrary | None = None,
) -> Planner:
    """What plans for these shapes are made from; curves are SmolLM2's, see ``CurveLibrary``.

    Args:
        name: in ``gac.models.shapes.SHAPES``.
        layers: fewer than the model has.

    Raises:
        ModelError: the shapes are unknown, or their weights have names of their own.
        ProfileError: as for ``gac.allocate``.
    """
    shapes = _shapes(name, layers)
    sites = family_of(shapes).sites(shapes)
    library = library or CurveLibrary.load()
    curves = library.curves_of(sites)
    table, used = select_profile(profile)
    head = 2 * _VOCABULARIES.get(name, _VOCABULARY) * shapes.hidden_size
    measured = Measured(
        model=f"{name} (random weights)",
        digest=f"shapes of {name}",
        params=sum(site.params for site in sites) + head,
        family=shapes.model_type,
        calibration=library.calibration,
        profile=used,
        factor=1.0,
    )
    recipe = Recipe.of(method=library.method, workloads=map(str, workloads), refit="none")
    return Planner(Problem(sites, curves, table, recipe, measured))


def model_of_shapes(
    name: str, *, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, layers: int | None = None
) -> PreTrainedModel:
    """A dense model of these shapes, with the random weights that transformers gives it, made on the device.

    Raises:
        ModelError: the shapes are unknown.
    """
    sizes = {"vocab_size": _VOCABULARIES.get(name, _VOCABULARY), "max_position_embeddings": _POSITIONS}
    config = _AutoConfig.for_model(**asdict(_shapes(name, layers)) | sizes, tie_word_embeddings=False)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: PreTrainedModel = _AutoModel.from_config(config).eval()
    finally:
        torch.set_default_dtype(before)
    return model.requires_grad_(False)


def _shapes(name: str, layers: int | None) -> Shapes:
    found: Shapes = shapes_of(name)
    return replace(found, num_hidden_layers=layers or found.num_hidden_layers)
