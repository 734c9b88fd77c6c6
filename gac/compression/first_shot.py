"""Where statistics are kept, of one shot or two, and the model of a first shot, where gradients are taken again.

That model (see ``gac.measurement.second_shot``) is the dense model compressed to ``FIRST_KEPT`` by its plan of one
shot, whatever is planned next: so the statistics of the second shot serve every budget, form and profile.
``docs/results-curvature.md`` has what it gives.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from gac.allocation.candidates import candidates
from gac.allocation.latencies import Timing
from gac.allocation.problem import as_knapsack
from gac.compression.apply import build_modules, merged
from gac.compression.refit import refit
from gac.core.distributed.ranks import ALONE, Ranks
from gac.core.errors import GacError
from gac.core.io import home
from gac.core.version import __version__
from gac.forms.curvature.methods import Method
from gac.forms.curvature.registry import METHODS
from gac.forms.loss_curves import LossCurves
from gac.measurement.calibration import CalibrationRun, LayerMoments
from gac.measurement.curves import measure_curves, stream_fits
from gac.measurement.second_shot import stream_second
from gac.measurement.store import StatisticsStore
from gac.measurement.text import Windows
from gac.models.families import family_of
from gac.models.linears import as_linear
from gac.models.sites import Site
from gac.plan.costs import PARAMS, floored
from gac.plan.plan import WeightChoice
from gac.plan.recipe import Shots, Space
from gac.runtime.modules import empty_linear
from gac.runtime.storage.eight_bits import READERS

FIRST_KEPT = 0.8
"""Kept fraction of the first shot: measured for second shots to 0.8 and to 0.6."""
STEP = 8
"""What the dims of the first shot are multiples of, on any GPU."""
_FORMAT = 13  # raised when what is kept of a layer changes, or how a first shot is made


def check_shots(shots: Shots, method: Method, rule: str, sites: Sequence[Site], model_type: str) -> None:
    """Refuse two shots where the method, the rule or the layers do not go with them.

    Args:
        sites: the family's.
        model_type: what the error calls the model.

    Raises:
        GacError: the method does not measure errors by gradients, the rule is a peer's, or the first shot could not be
            fitted again.
    """
    if shots == 1:
        return
    if not method.two_sided:
        known = ", ".join(one.name for one in METHODS if one.two_sided)
        given = f"shots=2 with method {method.name}, which measures errors without the gradients of single outputs"
        raise GacError(given, f"method {known}, whose gradients a second shot takes again", "Use shots=1.")
    if rule != "loss":
        given = f"shots=2 with rule {rule}"
        raise GacError(given, "rule loss: the others are compared as they come, in one shot", "Use shots=1.")
    if not any(weight.writes for site in sites for weight in site.weights):
        given = f"shots=2 of model type {model_type}, in which the residual stream itself passes norms"
        expected = "layers that only add to the residual stream, for the first shot is fitted again to that"
        raise GacError(given, expected, "Use shots=1.")


def first_shot(run: CalibrationRun) -> nn.Module:
    """The dense model compressed to ``FIRST_KEPT`` and fitted again, with weights of the dense shapes.

    It shares with the dense model all that is not compressed; the rest is a second copy on the same devices. The same
    model and windows give the same first shot.

    Args:
        run: of one shot; its model is all in memory, and as it was when this returns or raises.

    Raises:
        BudgetError: so small a model cannot be compressed so far.
        ModelError: a statistic is not finite, or a layer does more to the residual stream than to add.
        StatisticsError: what is kept cannot be written or read.
    """
    sites = family_of(run.model.config).sites(run.model.config)
    weights = _chosen(sites, measure_curves(run, sites).curves)
    factors = {layer: fit.kept for layer, fit in stream_fits(run, sites)}
    modules = build_modules(run, weights, sites, iter(factors.items()))
    fitted = refit(run, modules, weights, "residual", sites, factors)
    return _multiplied_out(run.model, weights, fitted)


def _chosen(sites: Sequence[Site], curves: LossCurves) -> list[WeightChoice]:
    """What every weight becomes: the least loss, whatever the GPU."""
    sets = [candidates(site, curves, Space(align=STEP), Timing(None, ()), (PARAMS,)) for site in sites]
    instance = as_knapsack(sets, {PARAMS: floored(FIRST_KEPT, sum(site.params for site in sites))})
    chosen = instance.chosen(instance.solve())
    return [choice for site, one in zip(sites, chosen, strict=True) for choice in one.choices(site.weights)]


def _multiplied_out(model: nn.Module, weights: Sequence[WeightChoice], modules: Mapping[str, nn.Module]) -> nn.Module:
    """A model that shares everything with this one but the weights that the modules stand for."""
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


def calibration_run(
    model: PreTrainedModel,
    digest: str,
    windows: Windows,
    method: Method,
    shots: Shots,
    *,
    progress: bool = True,
    ranks: Ranks = ALONE,
) -> CalibrationRun:
    """What measures a model, or goes on where that was measured before.

    The second shot's are kept by themselves, and its model is made when its moments are first asked for.

    Args:
        model: the dense model.
        digest: of its weights, or what else tells its statistics from those of other models.
        ranks: the processes that measure together; what is kept does not depend on how many there are.
    """
    key = f"{digest} {windows.digest} {method.power}"
    one = CalibrationRun(model, windows.ids, method, _store(key), progress, ranks=ranks)
    if shots == 1:
        return one
    two = replace(one, store=_store(f"{key}, gradients at {FIRST_KEPT}"))

    def second(run: CalibrationRun, sites: Sequence[Site]) -> Iterator[tuple[int, LayerMoments | None]]:
        return stream_second(replace(one, attended=run.attended), replace(two, model=first_shot(one)), sites)

    return replace(two, source=second)


def _store(of: str) -> StatisticsStore:
    key = hashlib.sha256(f"{__version__} {_FORMAT} {' '.join(READERS)} {of}".encode()).hexdigest()
    return StatisticsStore(home() / "statistics" / key[:24])
