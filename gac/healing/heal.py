"""Distil a compressed model from the dense one: layers one at a time, then the whole model."""

import logging
import time
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gac.checkpoint.planned import PlannedModel, attach_plan
from gac.core.distributed.ranks import Ranks
from gac.core.errors import HealingError
from gac.healing.layerwise import train_layers
from gac.healing.losses import mean_loss, windows_per_pass
from gac.healing.records import Result, TrainingBudget
from gac.healing.run import CheckpointFile, DistillationRun, key_of, trainables_of
from gac.healing.sharding import needs_sharding, offloaded
from gac.healing.text import HealingText, healing_text
from gac.healing.trainables import trained_weights
from gac.healing.training_mode import training_mode
from gac.healing.whole_model import train_whole_model
from gac.measurement.own_text import sampled_windows
from gac.measurement.session import planned_digest
from gac.measurement.texts import CalibrationText
from gac.models.families import family_of
from gac.models.loading import Loaded
from gac.models.modules import frozen
from gac.models.rotation import rotated
from gac.plan.plan import Healed, Plan

logger = logging.getLogger(__name__)


def heal_model(
    model: Any,
    plan: Plan,
    loaded: Loaded,
    against: Any,
    text: CalibrationText | None,
    budget: TrainingBudget,
    ranks: Ranks,
    start: float,
    show_progress: bool,
) -> tuple[PlannedModel, Result]:
    """Distil from the dense model that was ``loaded`` as ``against``, on a text; see ``distil``.

    A HealingError says if the held-out loss did not fall and the model is unchanged.
    """
    sites = family_of(loaded.model.config).sites(loaded.model.config)
    digest = planned_digest(plan, loaded, sites)
    sample = partial(sampled_windows, loaded.model, loaded.tokenizer, digest, budget.seed, ranks, show_progress)
    windows = healing_text(text, plan, loaded, sample, budget.labels > 0)
    owned = isinstance(against, (str, Path))
    with rotated(loaded.model, owned=owned) if plan.recipe.space.rotate else nullcontext():
        healed, result = distil(model, loaded.model, plan, digest, windows, budget, ranks, start, show_progress)
    if not result.progress.improved:
        raise result.failure or _no_improvement(result, budget)
    return healed, result


def distil(
    model: Any,
    dense: Any,
    plan: Plan,
    digest: str,
    windows: HealingText,
    budget: TrainingBudget,
    ranks: Ranks,
    start: float,
    show_progress: bool,
    compressing: bool = False,
) -> tuple[PlannedModel, Result]:
    """Train the compressed model in place towards the dense one, in the same basis, and record it in its plan.

    Model and plan are unchanged if the held-out loss does not fall. ``digest`` is that of the dense weights.
    """
    before = _divergence(model, dense, windows, ranks)
    file = CheckpointFile(key_of(model, digest, windows.tensors, budget))
    settings = plan, windows, budget, file, ranks, start, show_progress
    with frozen(dense), frozen(model):
        if needs_sharding(model, trained_numbers(plan, budget.dense), ranks):
            result = _run_sharded(model, dense, *settings)
        else:
            result = run_in_place(DistillationRun(model, dense, *settings))
    improved = result.progress.improved
    after = _divergence(model, dense, windows, ranks) if improved else before
    file.remove()  # only now: a run that is killed before resumes here
    if not improved:
        return model, result
    healed = Healed(
        texts=windows.names,
        windows=len(windows.train),
        window_tokens=int(windows.train.shape[1]),
        held=len(windows.heldout),
        tokens=result.progress.tokens,
        learning_rate=budget.learning_rate,
        seed=budget.seed,
        before=before,
        after=after,
        blocks=budget.blocks,
        dense=budget.dense,
        labels=budget.labels,
        asked=budget.tokens or 0,
        documents=windows.documents,
        bos=windows.bos,
        compressing=compressing,
    )
    change = f"held-out divergence {before:.4f} -> {after:.4f} nats a token"
    logger.info("healed in %.1f minutes: %s", (time.monotonic() - start) / 60, change)
    if budget.labels and after > before:
        logger.warning("the model drifts from the dense model: labels=%g made it learn the text", budget.labels)
    return attach_plan(model, replace(plan, healed=(*plan.healed, healed))), result


def trained_numbers(plan: Plan, dense: bool) -> int:
    return sum(choice.params for choice in trained_weights(plan, dense))


def run_in_place(run: DistillationRun) -> Result:
    """Train; the model ends with its best snapshot in its own dtype and storages, and unchanged if this raises."""
    improved = False
    try:
        result = train(run)
        improved = result.progress.improved
    finally:
        run.trainables.restore(run.best if improved else run.initial)
        run.initial, run.best, run.optimizer_state = {}, {}, {}
        run.trainables.close(changed=improved)
    return result


def _run_sharded(model: Any, dense: Any, *settings: Any) -> Result:
    """The same with sharded copies of both models, which wait in host memory meanwhile."""
    device = model.device
    with offloaded(model, dense):
        run = DistillationRun(deepcopy(model), deepcopy(dense), *settings)
        run.shard(run.ranks.mesh(device.type))
        result = train(run)
        if result.progress.improved:
            trainables = trainables_of(model, run.plan, run.budget)
            for name, value in run.trainables.gather(run.best):
                trainables.restore({name: value})
        del run  # which frees the memory for the full models
    if result.progress.improved:
        trainables.close(changed=True)
    return result


def train(run: DistillationRun) -> Result:
    """Train, or resume; the state in which this leaves the model is undefined."""
    failure = None
    with training_mode(run.model, run.dense):
        run.start_or_resume()
        try:
            train_layers(run)
            train_whole_model(run)
        except HealingError as error:
            failure = error
    return Result(run.progress, failure)


def _divergence(model: Any, dense: Any, text: HealingText, ranks: Ranks) -> float:
    with frozen(model), frozen(dense):
        batch = windows_per_pass(model, text.heldout.shape[1], ranks)
        loss = mean_loss(model, dense, text.heldout, batch, ranks=ranks)
    return max(loss, 0.0)  # rounding of equal models' logits may go below


def _no_improvement(result: Result, budget: TrainingBudget) -> HealingError:
    expected = "a decreasing held-out loss"
    losses = [point.heldout_loss for point in result.progress.curve if point.phase == "model"]
    if not losses:
        length = f"{budget.tokens:,} tokens" if budget.minutes is None else f"{budget.minutes:g} minutes"
        problem = f"{length} with blocks={budget.blocks:g}: no step of the whole model, and no gain by single layers"
        return HealingError(problem, expected, "Heal for longer, or with a smaller blocks.")
    rate, start = budget.learning_rate, result.progress.start_loss
    return HealingError(
        f"a held-out loss of {start:.4f}, and of {min(losses):.4f} nats a token at best, with learning_rate={rate:g}",
        expected,
        f"Heal with learning_rate={rate / 4:.2g}, for longer, or on more text.",
    )
