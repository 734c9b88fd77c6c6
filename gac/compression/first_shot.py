"""The model of a first shot, from which gradients are taken again.

That model (see ``gac.measurement.calibration.stream_second``) is the dense model compressed to ``FIRST_KEPT`` by its
plan of one shot, whatever is planned next: so the statistics of the second shot serve every budget, form and profile.
``results/curvature.md`` has what it gives.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy

from torch import nn

from gac.allocation.candidates import candidates
from gac.allocation.latencies import Timing
from gac.allocation.problem import as_knapsack
from gac.compression.apply import build_modules, merged
from gac.compression.refit import refit
from gac.forms.loss_curves import LossCurves
from gac.measurement.calibration import FIRST_KEPT, CalibrationRun
from gac.measurement.curves import fit_layers, measure_curves
from gac.models.families import family_of
from gac.models.linears import as_linear
from gac.models.sites import Site
from gac.plan.costs import PARAMS, floored
from gac.plan.plan import WeightChoice
from gac.plan.recipe import Space
from gac.runtime.modules import empty_linear

STEP = 8
"""The dims of the first shot are multiples of it, on any GPU."""


def first_shot(run: CalibrationRun) -> nn.Module:
    """The dense model compressed to ``FIRST_KEPT`` and fitted again, with weights of the dense shapes.

    It shares with the dense model all that is not compressed; the rest is a second copy on the same devices. The same
    model and windows give the same first shot. The dense model is all in memory, and as it was when this returns.

    Raises:
        BudgetError: so small a model cannot be compressed so far.
        ModelError: a layer does more to the residual stream than to add.
    """
    sites = family_of(run.model.config).sites(run.model.config)
    weights = _chosen(sites, measure_curves(run, sites).curves)
    fits = fit_layers(run, sites)
    modules = build_modules(run, weights, sites, fits)
    fitted = refit(run, modules, weights, "residual", sites, fits)
    return _multiplied_out(run.model, weights, fitted)


def _chosen(sites: Sequence[Site], curves: LossCurves) -> list[WeightChoice]:
    sets = [candidates(site, curves, Space(align=STEP), Timing(None, ()), (PARAMS,)) for site in sites]
    instance = as_knapsack(sets, {PARAMS: floored(FIRST_KEPT, sum(site.params for site in sites))})
    chosen = instance.chosen(instance.solve())
    return [choice for site, candidate in zip(sites, chosen, strict=True) for choice in candidate.choices(site.weights)]


def _multiplied_out(model: nn.Module, weights: Sequence[WeightChoice], modules: Mapping[str, nn.Module]) -> nn.Module:
    """Copy the model, with the product of the factors in place of each of these weights; all else is shared."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied, choices = deepcopy(model, shared), {choice.name: choice for choice in weights}
    for name, module in modules.items():
        if choice := choices.get(name):
            linear = as_linear(module)
            dense = merged(choice, linear.state_dict())
            reference = dense["weight"]
            sizes = choice.weight.in_features, choice.weight.out_features
            module = empty_linear(*sizes, "bias" in dense, device=reference.device, dtype=reference.dtype)
            module.load_state_dict(dense)
        copied.set_submodule(name, module)
    return copied
