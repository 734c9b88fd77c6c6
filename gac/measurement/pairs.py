"""For the cheapest changes that the model is run for: what text loses with one, and what two lose beyond their sum."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations

import torch
from torch import Tensor

from gac.core.progress import progress_bar
from gac.forms import Form
from gac.forms.loss_curves import LossCurves
from gac.forms.tensors import RunForm, joint_weights, tensors_of
from gac.measurement.calibration import CalibrationRun, decoder_layers
from gac.measurement.runs import ModelRuns
from gac.models.sites import Weight
from gac.schemes import DEFAULT_SCHEME

MOST = 8
"""The number of changes that are paired: those that lose least for each parameter that they save."""
ON_TEXT = 4
"""The number of these that are measured on text too. Each may take all of the calibration text."""


def with_pairs(
    run: CalibrationRun, weights: Mapping[int, Sequence[Weight]], forms: Sequence[Form], curves: LossCurves
) -> LossCurves:
    """The curves with both, of forms with ``runs`` that can do without a weight; read from the store, or measured.

    Args:
        weights: of every layer.
        curves: what each change loses by itself.
    """
    pairs: dict[frozenset[tuple[str, str]], float] = {}
    on_text: dict[tuple[str, str], float] = {}
    for form in (form for form in forms if form.loss.needs_forward_runs and form.min_dim == 0):
        measure = partial(_measured, run, weights, form, curves)
        for joined, loss in run.stored(f"pairs-{run.method.name}-{form.name}", measure).items():
            changes = [(form.name, name) for name in joined.split(" ")]
            if len(changes) == 2:
                pairs[frozenset(changes)] = float(loss)
            else:
                on_text[changes[0]] = float(loss)
    return replace(curves, pairs=pairs, on_text=on_text)


def _measured(
    run: CalibrationRun, weights: Mapping[int, Sequence[Weight]], form: Form, curves: LossCurves
) -> dict[str, Tensor]:
    """Losses by the names of two weights, joined by a blank; by single names, losses on text."""
    tensors = tensors_of(form)
    assert isinstance(tensors, RunForm), f"{form.name} is marked as measured by runs"
    groups = [group for of_layer in weights.values() for group in joint_weights(form, of_layer)]
    names = [group[-1].name for group in groups]
    losses = {name: float(curves.by_key[form.name, DEFAULT_SCHEME, name].loss[0]) for name in names}
    groups.sort(key=lambda group: losses[group[-1].name] / sum(weight.params for weight in group))
    layers = decoder_layers(run.model, weights)
    runs = ModelRuns(run.model, layers, run.windows, [*chain(*groups)])
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
