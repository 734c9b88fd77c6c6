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

from gac.core.progress import progress_bar
from gac.forms import Form
from gac.forms.artifacts import LayerArtifacts
from gac.forms.latent.anchors import anchor_ranks, denoised
from gac.forms.loss_curves import LossCurve, LossCurves, WholeModelLoss
from gac.forms.tensors import SiteBuild, Statistics, tensors_of
from gac.measurement.calibration import ATTENDED, CalibrationRun, decoder_layers
from gac.measurement.runs import ModelRuns, unseen
from gac.measurement.store import read_arrays, write_tensors
from gac.models.linears import read_weight
from gac.models.sites import Weight

Chosen = Mapping[Weight, int]
KeptOf = Callable[[Form], LayerArtifacts]


def calibrated_to_whole_model(
    run: CalibrationRun,
    weights: Mapping[int, Sequence[Weight]],
    forms: Sequence[Form],
    curves: LossCurves,
    artifacts_of: KeptOf,
) -> LossCurves:
    """The curves with what forms with ``anchors`` lose together; read from the store, or measured.

    Args:
        weights: of every layer.
        curves: what each weight loses by itself.
        kept: what a form has kept of all weights; asked for where the model is run.

    Raises:
        ModelError: a loss is not finite.
        StatisticsError: what is kept cannot be written or read.
    """
    wholes: dict[str, WholeModelLoss] = {}
    for form in forms if run.method.two_sided and run.held_out else ():
        if form.loss.anchors:
            whole_model = run.ranks.once(partial(_stored_or_measured, run, weights, form, curves, artifacts_of))
            wholes |= (
                {
                    form_or_variant.name: whole_model
                    for form_or_variant in forms
                    if (form_or_variant.base_form or form_or_variant).name == form.name
                }
                if whole_model.summed
                else {}
            )
    return replace(curves, wholes=wholes)


def _stored_or_measured(
    run: CalibrationRun, weights: Mapping[int, Sequence[Weight]], form: Form, curves: LossCurves, artifacts_of: KeptOf
) -> WholeModelLoss:
    path = None
    if run.store is not None:
        path = run.store.measured(f"whole-{run.method.name}-{ATTENDED}-{form.name}", 0)
        if path.exists():
            stored = read_arrays(path)
            return WholeModelLoss(form.name, tuple(stored["summed"].tolist()), tuple(stored["lost"].tolist()))
    whole_model = _measured(run, weights, form, curves, artifacts_of(form))
    if path is not None:
        stored = {"summed": np.array(whole_model.summed), "lost": np.array(whole_model.lost)}
        write_tensors(path, {name: torch.from_numpy(values) for name, values in stored.items()})
    return whole_model


def _measured(
    run: CalibrationRun,
    weights: Mapping[int, Sequence[Weight]],
    form: Form,
    curves: LossCurves,
    artifacts: LayerArtifacts,
) -> WholeModelLoss:
    taken = {weight: curve for weight in chain(*weights.values()) if (curve := curves.of(form, weight))}
    work = SiteBuild([*taken], artifacts, Statistics(run.model, unseen, run.method, artifacts))
    runs = ModelRuns(run.model, decoder_layers(run.model, weights), run.windows[run.held_out], [], every=True)

    def lost(ranks: Chosen) -> float:
        return runs.divergence(
            {weight.name: tensors_of(form).module(work, weight, rank) for weight, rank in ranks.items()}
        )

    levels = [ranks for level in form.loss.anchors if (ranks := _ranks(taken, level / (2 * runs.layers)))]
    coarse = any(torch.finfo(read_weight(run.model, weight.name).dtype).bits < 32 for weight in taken)
    rounding = lost({weight: curve.full for weight, curve in taken.items()}) if levels and coarse else 0.0
    bar = progress_bar("changing all weights", "run", steps=levels, shown=run.progress)
    measured = [lost(ranks) - rounding for ranks in bar]
    return _curve_of_sum(form, [_summed(taken, ranks) for ranks in levels], measured)


def _ranks(curves: Mapping[Weight, LossCurve], least: float) -> Chosen:
    """Return the largest rank of each weight at which it loses so much; others stay as they are."""
    return {weight: rank for weight, curve in curves.items() for rank in anchor_ranks(curve.loss, [least])}


def _summed(curves: Mapping[Weight, LossCurve], ranks: Chosen) -> float:
    return sum(float(curves[weight].loss[rank]) for weight, rank in ranks.items())


def _curve_of_sum(form: Form, summed: Sequence[float], measured: Sequence[float]) -> WholeModelLoss:
    known = dict(sorted(zip(summed, measured, strict=True)))
    lost = denoised(np.array([*known.values()]), np.array([*known]))
    return WholeModelLoss(form.name, tuple(known), tuple(lost.tolist()))
