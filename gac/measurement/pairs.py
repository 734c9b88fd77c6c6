"""For the cheapest changes that the model is run for: what text loses with one, and what two lose beyond their sum."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

import torch

from gac.core.progress import progress_bar
from gac.forms import Form
from gac.forms.loss_curves import LossCurves
from gac.forms.tensors import RunForm, joint_weights, tensors_of
from gac.measurement.calibration import CalibrationRun, decoder_layers
from gac.measurement.runs import ModelRuns
from gac.measurement.store import read_tensors, write_tensors
from gac.models.sites import Weight

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

    Raises:
        ModelError: a loss is not finite.
        StatisticsError: what is kept cannot be written or read.
    """
    pairs: dict[frozenset[tuple[str, str]], float] = {}
    on_text: dict[tuple[str, str], float] = {}
    for form in (form for form in forms if form.loss.needs_forward_runs and form.min_dim == 0):
        lost = run.ranks.once(partial(_stored_or_measured, run, weights, form, curves))
        pairs |= {frozenset((form.name, name) for name in pair): loss for pair, loss in lost.items() if len(pair) == 2}
        on_text |= {(form.name, name): loss for pair, loss in lost.items() if len(pair) == 1 for name in pair}
    return replace(curves, pairs=pairs, on_text=on_text)


_CPU = torch.device("cpu")


def _stored_or_measured(
    run: CalibrationRun, weights: Mapping[int, Sequence[Weight]], form: Form, curves: LossCurves
) -> dict[frozenset[str], float]:
    path = None if run.store is None else run.store.measured(f"pairs-{run.method.name}-{form.name}", 0)
    if path is not None and path.exists():
        return {frozenset(name.split(" ")): float(loss) for name, loss in read_tensors(path, _CPU).items()}
    lost = _measured(run, weights, form, curves)
    if path is not None:
        write_tensors(
            path, {" ".join(sorted(pair)): torch.tensor(loss, dtype=torch.float32) for pair, loss in lost.items()}
        )
    return lost


def _measured(
    run: CalibrationRun, weights: Mapping[int, Sequence[Weight]], form: Form, curves: LossCurves
) -> dict[frozenset[str], float]:
    """Losses by pairs of names; by single names, losses on text."""
    tensors = tensors_of(form)
    assert isinstance(tensors, RunForm), f"{form.name} is marked as measured by runs"
    taken = [block for of_layer in weights.values() for block in joint_weights(form, of_layer)]
    alone = {block[-1].name: curves.of(form, block[-1]) for block in taken}
    losses = {name: float(curve.loss[0]) for name, curve in alone.items() if curve is not None}
    taken.sort(key=lambda block: losses[block[-1].name] / sum(weight.params for weight in block))
    runs = ModelRuns(run.model, decoder_layers(run.model, weights), run.windows, [w for block in taken for w in block])
    modules = {block[-1].name: tensors.modules(runs, block) for block in taken[:MOST]}
    steps = [*combinations([*modules][:ON_TEXT], 1), *combinations(modules, 2)]
    measured: dict[frozenset[str], float] = {}
    for names in progress_bar("leaving out pairs", "step", steps=steps, shown=run.progress):
        if len(names) == 1:
            measured[frozenset(names)] = runs.lost(modules[names[0]])
        else:
            both = runs.divergence(modules[names[0]] | modules[names[1]])
            measured[frozenset(names)] = both - sum(losses[name] for name in names)
    return measured
