"""Losses of several changes at once, measured by running the model, beyond the sum of what each loses by itself.

Forms with ``needs_forward_runs``: for the cheapest changes, what text loses with one, and the model with two.

Forms with ``anchors`` have curves that runs of the model correct, each with one weight changed
(``gac.forms.latent.torch``). For each of these levels all weights are changed at once, at the ranks where each
loses an equal part of it. ``gac.forms.loss_curves.WholeModelLoss`` has what that makes of a sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations

import numpy as np
import torch
from torch import Tensor

from gac.core.progress import progress_bar
from gac.forms import Form
from gac.forms.artifacts import LayerArtifacts
from gac.forms.latent.torch import anchor_ranks, denoised
from gac.forms.loss_curves import LossCurves, WholeModelLoss
from gac.forms.tensors import RunForm, SiteBuild, Statistics, joint_weights, tensors_of
from gac.measurement.calibration import ATTENDED, CalibrationRun, decoder_layers
from gac.measurement.runs import ModelRuns, unseen
from gac.models.linears import read_weight
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
        if form.loss.anchors and run.method.two_sided and run.held_out:
            measure = partial(_measure_whole_model, run, weights, form, curves, artifacts)
            name = f"{ATTENDED}-{form.name}" if form.loss.uses_attention_curvature else form.name
            stored = run.stored(f"whole-{run.method.name}-{name}", measure)
            whole_model = WholeModelLoss(form.name, tuple(stored["summed"].tolist()), tuple(stored["lost"].tolist()))
            variants = [each for each in forms if (each.base_form or each).name == form.name]
            wholes |= {variant.name: whole_model for variant in variants if whole_model.summed}
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


def _measure_whole_model(
    run: CalibrationRun, weights: Layers, form: Form, curves: LossCurves, artifacts: LayerArtifacts
) -> dict[str, Tensor]:
    """The sums of losses, ascending, and the losses of the model, float64."""
    curve_of = {weight: curve for weight in chain(*weights.values()) if (curve := curves.of(form, weight))}
    build = SiteBuild([*curve_of], Statistics(run.model, unseen, run.method, artifacts))
    runs = ModelRuns(run.model, decoder_layers(run.model, weights), run.windows[run.held_out], [], every=True)

    def lost(ranks: Mapping[Weight, int]) -> float:
        tensors = tensors_of(form)
        return runs.divergence({weight.name: tensors.module(build, weight, rank) for weight, rank in ranks.items()})

    levels: list[dict[Weight, int]] = []
    for level in form.loss.anchors:
        # Weights that never lose so much stay as they are.
        least = level / (2 * runs.layers)
        ranks = {weight: rank for weight, curve in curve_of.items() for rank in anchor_ranks(curve.loss, [least])}
        levels += [ranks] if ranks else []
    coarse = any(torch.finfo(read_weight(run.model, weight.name).dtype).bits < 32 for weight in curve_of)
    rounding = lost({weight: curve.full for weight, curve in curve_of.items()}) if levels and coarse else 0.0
    by_sum: dict[float, float] = {}
    for ranks in progress_bar("changing all weights", "run", steps=levels, shown=run.progress):
        summed = sum(float(curve_of[weight].loss[rank]) for weight, rank in ranks.items())
        by_sum[summed] = lost(ranks) - rounding
    sums = np.array(sorted(by_sum))
    losses = denoised(np.array([by_sum[summed] for summed in sums]), sums)
    return {"summed": torch.from_numpy(sums), "lost": torch.from_numpy(losses)}
