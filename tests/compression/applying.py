"""A plan applied to a random model, as the pipeline does it, and what the model then says."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gac.compression.apply import build_modules, changed_sites
from gac.compression.refit import refit
from gac.forms.curvature.registry import METHODS
from gac.forms.planned_sites import as_planned
from gac.measurement.calibration import CalibrationRun
from gac.measurement.curves import fit_layers
from gac.measurement.store import StatisticsStore, temporary_store
from gac.models.digests import model_digest
from gac.models.families import family_of
from gac.models.modules import swap_in
from gac.models.sites import Weight
from gac.plan.plan import Plan
from tests.models.small import weights_of

IDS = torch.arange(40).reshape(2, 20)


def applied(model: PreTrainedModel, plan: Plan, method: str = "kfac", ids: Tensor = IDS) -> PreTrainedModel:
    sites = as_planned(family_of(model.config).sites(model.config), plan.recipe.space.forms, fused=False)
    how = METHODS.get(method)
    store = _store(model_digest(model, ()), how.name, ids.numpy().tobytes())
    run = CalibrationRun(model, ids, how, store=store, progress=False)
    fits = fit_layers(run, sites, forms=plan.recipe.space.forms)
    modules = build_modules(run, plan.weights, changed_sites(plan, sites), fits)
    if plan.recipe.refit != "none":
        modules = refit(run, modules, plan.weights, plan.recipe.refit, sites, fits)
    swap_in(model, modules)
    return model


def smaller_dims(weights: Sequence[Weight]) -> dict[str, tuple[str, int]]:
    """Every form but head_dim, at dims that cost something."""
    small = {w.name: ("low_rank", 8) for w in weights if ".0." in w.name}
    return small | {w.name: ("narrow", 40) for w in weights if ".1." in w.name and w.neurons}


def with_dims(model: Any, dims_of: Callable[[Sequence[Weight]], Mapping[str, tuple[str, int]]], make_plan: Any) -> Any:
    """The model with smaller weights, and with its plan."""
    plan = make_plan(model.config, dims_of(weights_of(model.config)))
    small: Any = applied(model, plan)
    small.gac_plan = plan
    return small


@lru_cache(maxsize=2)
def _store(model: str, method: str, ids: bytes) -> StatisticsStore:
    """What was measured of a model is found again where another plan is applied to it right after."""
    return temporary_store()


def logits(model: PreTrainedModel, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def generates_the_same(model: Any) -> bool:
    """Greedy tokens with a dynamic and a static cache are those without one."""
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    caches: tuple[dict[str, Any], ...] = {"use_cache": False}, {}, {"cache_implementation": "static"}
    alone, *cached = (model.generate(IDS, **options, **cache) for cache in caches)
    return all(torch.equal(alone, tokens) for tokens in cached)


def losses_of_three_steps(model: Any) -> list[float]:
    """Of training what needs gradients on ``IDS``."""
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def divergence(dense: Tensor, other: Tensor) -> float:
    """Of logits: Kullback and Leibler's, the mean over all tokens."""
    one, two = dense.log_softmax(-1), other.log_softmax(-1)
    return float((one.exp() * (one - two)).sum(-1).mean())
