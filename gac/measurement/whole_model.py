"""Measure the loss of the whole model in one form, by running it, to correct the sum of per-weight losses.

Forms with ``anchors`` have curves that runs of the model correct, each with one weight changed
(``gac.forms.latent.anchors``). For each of these levels all weights are changed at once, at the ranks where each
loses an equal part of it. ``gac.forms.loss_curves.WholeModelLoss`` has what that makes of a sum.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from gac.core.progress import progress_bar
from gac.forms import Form
from gac.forms.artifacts import LayerArtifacts
from gac.forms.latent.anchors import anchor_ranks, denoised
from gac.forms.loss_curves import LossCurve, LossCurves, WholeModelLoss
from gac.forms.tensors import SiteBuild, Statistics, tensors_of
from gac.measurement.calibration import ATTENDED, CalibrationRun, decoder_layers
from gac.measurement.runs import ModelRuns, unseen
from gac.models.linears import read_weight
from gac.models.sites import Weight

ArtifactsOf = Callable[[Form], LayerArtifacts]


def calibrated_to_whole_model(
    run: CalibrationRun,
    weights: Mapping[int, Sequence[Weight]],
    forms: Sequence[Form],
    curves: LossCurves,
    artifacts_of: ArtifactsOf,
) -> LossCurves:
    """The curves with what forms with ``anchors`` lose together; read from the store, or measured.

    Args:
        weights: of every layer.
        curves: what each weight loses by itself.
        artifacts_of: what a form has kept of all weights; asked for where the model is run.
    """
    wholes: dict[str, WholeModelLoss] = {}
    for form in forms if run.method.two_sided and run.held_out else ():
        if form.loss.anchors:
            measure = partial(_measured, run, weights, form, curves, artifacts_of)
            stored = run.stored(f"whole-{run.method.name}-{ATTENDED}-{form.name}", measure)
            whole_model = WholeModelLoss(form.name, tuple(stored["summed"].tolist()), tuple(stored["lost"].tolist()))
            if whole_model.summed:
                variants = [each for each in forms if (each.base_form or each).name == form.name]
                wholes |= {variant.name: whole_model for variant in variants}
    return replace(curves, wholes=wholes)


def _measured(
    run: CalibrationRun,
    weights: Mapping[int, Sequence[Weight]],
    form: Form,
    curves: LossCurves,
    artifacts_of: ArtifactsOf,
) -> dict[str, Tensor]:
    """The sums of losses, ascending, and the losses of the model, float64."""
    curve_of = {weight: curve for weight in chain(*weights.values()) if (curve := curves.of(form, weight))}
    artifacts = artifacts_of(form)
    build = SiteBuild([*curve_of], artifacts, Statistics(run.model, unseen, run.method, artifacts))
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
    bar = progress_bar("changing all weights", "run", steps=levels, shown=run.progress)
    known = dict(sorted((_sum_of(curve_of, ranks), lost(ranks) - rounding) for ranks in bar))
    summed = np.array([*known])
    return {"summed": torch.from_numpy(summed), "lost": torch.from_numpy(denoised(np.array([*known.values()]), summed))}


def _sum_of(curves: Mapping[Weight, LossCurve], ranks: Mapping[Weight, int]) -> float:
    return sum(float(curves[weight].loss[rank]) for weight, rank in ranks.items())
