"""A plan applied to a random model, as the pipeline does it, and what the model then says."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gac.compression.apply import build_modules, changed_sites, swap_in
from gac.models.families import family_of
from gac.plan import Plan
from gac.sensitivity.curves import stream_fits
from gac.sensitivity.methods import method_named
from gac.sites import as_planned

IDS = torch.arange(40).reshape(2, 20)


def applied(model: PreTrainedModel, plan: Plan, method: str = "kfac") -> PreTrainedModel:
    sites = as_planned(family_of(model.config).sites(model.config), plan.forms, fused=False)
    fits = stream_fits(model, sites, IDS, method_named(method), None, progress=False)
    factors = ((layer, fit.factors) for layer, fit in fits)
    changed = changed_sites(plan, sites)
    swap_in(model, build_modules(model, plan, changed, factors, method_named(method)))
    return model


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits
