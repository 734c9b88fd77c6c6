"""What all weights in one form lose together, by running the model: losses of single weights do not add up.

Forms with ``anchors`` have curves that runs of the model correct, each with one weight changed
(``gac.forms.latent.anchors``). For each of these levels all weights are changed at once, at the ranks where each
loses an equal part of it. ``gac.forms.loss_curves.Whole`` has what that makes of a sum.
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


def with_wholes(
    run: CalibrationRun,
    weights: Mapping[int, Sequence[Weight]],
    forms: Sequence[Form],
    curves: LossCurves,
    kept: KeptOf,
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
            whole = run.ranks.once(partial(_kept_or_measured, run, weights, form, curves, kept))
            wholes |= (
                {one.name: whole for one in forms if (one.base_form or one).name == form.name} if whole.summed else {}
            )
    return replace(curves, wholes=wholes)


def _kept_or_measured(
    run: CalibrationRun, weights: Mapping[int, Sequence[Weight]], form: Form, curves: LossCurves, kept: KeptOf
) -> WholeModelLoss:
    path = None
    if run.store is not None:
        path = run.store.measured(f"whole-{run.method.name}-{ATTENDED}-{form.name}", 0)
        if path.exists():
            found = read_arrays(path)
            return WholeModelLoss(form.name, tuple(found["summed"].tolist()), tuple(found["lost"].tolist()))
    whole = _measured(run, weights, form, curves, kept(form))
    if path is not None:
        found = {"summed": np.array(whole.summed), "lost": np.array(whole.lost)}
        write_tensors(path, {name: torch.from_numpy(values) for name, values in found.items()})
    return whole


def _measured(
    run: CalibrationRun, weights: Mapping[int, Sequence[Weight]], form: Form, curves: LossCurves, kept: LayerArtifacts
) -> WholeModelLoss:
    taken = {weight: curve for weight in chain(*weights.values()) if (curve := curves.of(form, weight))}
    work = SiteBuild([*taken], kept, Statistics(run.model, unseen, run.method, kept))
    runs = ModelRuns(run.model, decoder_layers(run.model, weights), run.windows[run.held_out], [], every=True)

    def lost(ranks: Chosen) -> float:
        return runs.divergence({one.name: tensors_of(form).module(work, one, rank) for one, rank in ranks.items()})

    levels = [ranks for level in form.loss.anchors if (ranks := _ranks(taken, level / (2 * runs.layers)))]
    coarse = any(torch.finfo(read_weight(run.model, weight.name).dtype).bits < 32 for weight in taken)
    rounding = lost({weight: curve.full for weight, curve in taken.items()}) if levels and coarse else 0.0
    bar = progress_bar("changing all weights", "run", steps=levels, shown=run.progress)
    measured = [lost(ranks) - rounding for ranks in bar]
    return _whole(form, [_summed(taken, ranks) for ranks in levels], measured)


def _ranks(curves: Mapping[Weight, LossCurve], least: float) -> Chosen:
    """Of each weight the largest rank at which it loses so much; those that never do are left as they are."""
    return {weight: rank for weight, curve in curves.items() for rank in anchor_ranks(curve.loss, [least])}


def _summed(curves: Mapping[Weight, LossCurve], ranks: Chosen) -> float:
    return sum(float(curves[weight].loss[rank]) for weight, rank in ranks.items())


def _whole(form: Form, summed: Sequence[float], measured: Sequence[float]) -> WholeModelLoss:
    """Of sums in any order."""
    known = dict(sorted(zip(summed, measured, strict=True)))
    lost = denoised(np.array([*known.values()]), np.array([*known]))
    return WholeModelLoss(form.name, tuple(known), tuple(lost.tolist()))
