"""Losses of several changes at once, measured by running the model, beyond the sum of what each loses by itself.

Forms with ``needs_forward_runs``: for the cheapest changes, what text loses with one, and the model with two.

Forms with ``levels``: for each of these all weights are changed at once, where each loses an equal part of it. The
model is run one layer after the other, so that the changes of one layer are in memory at a time.
``gac.forms.loss_curves.WholeModelLoss`` has what that makes of a sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations

import numpy as np
import torch
from torch import Tensor, nn

from gac.core.progress import progress_bar
from gac.forms import Form
from gac.forms.artifacts import LayerArtifacts
from gac.forms.latent.torch import anchor_ranks, denoised
from gac.forms.loss_curves import LossCurves, WholeModelLoss
from gac.forms.tensors import RunForm, SiteBuild, Statistics, joint_weights, tensors_of
from gac.measurement.calibration import ATTENDED, ROUTED, CalibrationRun, decoder_layers
from gac.measurement.runs import ModelRuns, unseen
from gac.models.sites import Weight
from gac.schemes import DEFAULT_SCHEME

MOST = 8
"""The number of changes that are paired: those that lose least for each parameter that they save."""
ON_TEXT = 4
"""The number of these that are measured on text too. Each may take all of the calibration text."""

Layers = Mapping[int, Sequence[Weight]]


def with_joint_losses(
    run: CalibrationRun, weights: Layers, forms: Sequence[Form], curves: LossCurves, artifacts: LayerArtifacts
) -> LossCurves:
    """The curves with what changes lose together; ``weights`` and ``artifacts`` are of all layers."""
    pairs: dict[frozenset[tuple[str, str]], float] = {}
    on_text: dict[tuple[str, str], float] = {}
    wholes: dict[str, WholeModelLoss] = {}
    for form in forms:
        if form.loss.needs_forward_runs and form.min_dim == 0:
            measure = partial(_measure_pairs, run, weights, form, curves)
            for joined, loss in run.stored(f"pairs-{run.method.name}-{form.name}", measure).items():
                changes = [(form.name, name) for name in joined.split(" ")]
                if len(changes) == 2:
                    pairs[frozenset(changes)] = float(loss)
                else:
                    on_text[changes[0]] = float(loss)
        if form.loss.levels and run.method.two_sided and run.held_out:
            measure = partial(_measure_whole_model, run, weights, form, curves, artifacts)
            text = ROUTED if form.loss.uses_routed_tokens else ATTENDED
            stored = run.stored(f"whole-{run.method.name}-{text}-{form.name}", measure)
            whole_model = WholeModelLoss(form.name, tuple(stored["summed"].tolist()), tuple(stored["lost"].tolist()))
            if whole_model.summed:
                wholes |= dict.fromkeys(_measured_like(form, forms), whole_model)
                wholes |= {each.name: replace(whole_model, form=each.name) for each in _variants(form, weights)}
    return replace(curves, pairs=pairs, on_text=on_text, wholes=wholes)


def _measure_pairs(run: CalibrationRun, weights: Layers, form: Form, curves: LossCurves) -> dict[str, Tensor]:
    """Losses by the names of two weights, joined by a blank; by single names, losses on text."""
    tensors = tensors_of(form)
    assert isinstance(tensors, RunForm), f"{form.name} is marked as measured by runs"
    groups = [group for of_layer in weights.values() for group in joint_weights(form, of_layer)]
    names = [group[-1].name for group in groups]
    losses = {name: float(curves.by_key[form.name, DEFAULT_SCHEME, name].loss[0]) for name in names}
    groups.sort(key=lambda group: losses[group[-1].name] / sum(weight.params for weight in group))
    runs = ModelRuns(run.model, decoder_layers(run.model, weights), run.windows, [*chain(*groups)])
    modules = {group[-1].name: tensors.modules(runs, group) for group in groups[:MOST]}
    steps = [*combinations([*modules][:ON_TEXT], 1), *combinations(modules, 2)]
    measured: dict[str, Tensor] = {}
    for step in progress_bar("leaving out pairs", "step", steps=steps, shown=run.progress):
        if len(step) == 1:
            loss = runs.lost(modules[step[0]])
        else:
            loss = runs.divergence(modules[step[0]] | modules[step[1]]) - sum(losses[name] for name in step)
        measured[" ".join(sorted(step))] = torch.tensor(loss, dtype=torch.float32)
    return measured


def _measured_like(form: Form, forms: Sequence[Form]) -> list[str]:
    return [each.name for each in forms if (each.base_form or each).name == form.name]


def _variants(form: Form, weights: Layers) -> set[Form]:
    """Return the variants that were measured along with the form, which have curves of all that they lose."""
    return {variant for weight in chain(*weights.values()) for variant in form.variants(weight)} - {form}


@dataclass(frozen=True)
class _Change:
    """Weights of a site in a form, and what that loses by their curve."""

    form: Form
    dim: int
    weights: Sequence[Weight]
    loss: float

    @property
    def params(self) -> int:
        return sum(self.form.params(weight, self.dim) for weight in self.weights)

    def modules(self, statistics: Statistics) -> dict[str, nn.Module]:
        build, tensors = SiteBuild(self.weights, statistics), tensors_of(self.form)
        return {weight.name: tensors.module(build, weight, self.dim) for weight in self.weights}


def _measure_whole_model(
    run: CalibrationRun, weights: Layers, form: Form, curves: LossCurves, artifacts: LayerArtifacts
) -> dict[str, Tensor]:
    """The sums of losses, ascending, and the losses of the model, float64."""
    joint = [*chain(*(_sites(form, of_layer) for of_layer in weights.values()))]
    sites = [site for site in joint if curves.of(form, site[-1])]
    statistics = Statistics(run.model, unseen, run.method, artifacts)
    runs = ModelRuns(run.model, decoder_layers(run.model, weights), run.windows[run.held_out], [], every=True)

    def lost(changes: Sequence[_Change]) -> float:
        return runs.divergence_in_turn(
            {change.weights[0].name: partial(change.modules, statistics) for change in changes}
        )

    def equal_parts(level: float) -> list[_Change]:
        # Weights that never lose so much stay as they are.
        options = [_cheapest(form, site, curves, level / len(sites)) for site in sites]
        return [change for change in options if change]

    levels = [changes for changes in map(equal_parts, form.loss.levels if sites else ()) if changes]
    full = [_Change(form, form.full(site[-1]), site, 0.0) for site in sites]
    coarse = any(torch.finfo(_dtype(run.model, weight)).bits < 32 for site in sites for weight in site)
    rounding = lost(full) if levels and coarse else 0.0
    by_sum: dict[float, float] = {}
    for changes in progress_bar("changing all weights", "run", steps=levels, shown=run.progress):
        by_sum[sum(change.loss for change in changes)] = lost(changes) - rounding
    sums = np.array(sorted(by_sum))
    losses = denoised(np.array([by_sum[summed] for summed in sums]), sums)
    return {"summed": torch.from_numpy(sums), "lost": torch.from_numpy(losses)}


def _sites(form: Form, weights: Sequence[Weight]) -> list[list[Weight]]:
    """Return what the form changes as one: a router with its experts, or a weight by itself."""
    return [*joint_weights(form, weights)] if form.loss.uses_routed_tokens else [[weight] for weight in weights]


def _cheapest(form: Form, site: Sequence[Weight], curves: LossCurves, least: float) -> _Change | None:
    """Return the form or its variant with the fewest parameters, at the largest dim that loses ``least`` or more."""
    options = []
    for variant in form.variants(site[-1]):
        if (curve := curves.of(variant, site[-1])) is None:
            continue
        for rank in anchor_ranks(curve.loss, [least]):
            dim = max(rank, variant.least(site[-1]))
            options.append(_Change(variant, dim, site, float(curve.loss[dim])))
    return min(options, key=lambda change: change.params, default=None)


def _dtype(model: nn.Module, weight: Weight) -> torch.dtype:
    parameter: nn.Parameter = next(model.get_submodule(weight.name).parameters())
    return parameter.dtype
