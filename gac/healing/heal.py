"""A compressed model and the dense one it came from: checked, trained, and said to be healed."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gac.checkpoint.attach import attach_plan
from gac.checkpoint.planned import PlannedModel
from gac.compression.apply import changed_sites
from gac.core.distributed.ranks import ALONE, Ranks
from gac.core.errors import HealingError
from gac.healing.course import Ended, run, run_in_parts
from gac.healing.healing import Healing
from gac.healing.logits import mean_loss, windows_at_once
from gac.healing.own_text import own_windows
from gac.healing.shards import wanted
from gac.healing.state import StateFile, key_of
from gac.healing.text import HealingText, healing_text
from gac.healing.work import Work
from gac.measurement.text import Windows
from gac.measurement.texts import CalibrationText
from gac.measuring import in_basis, planned_digest
from gac.models.families import family_of
from gac.models.loading import Loaded
from gac.models.modules import frozen
from gac.plan.plan import Healed, Plan

logger = logging.getLogger(__name__)


def origin_digest(plan: Plan, loaded: Loaded) -> str:
    """The digest of a dense model, which has to be the one that the plan was made for.

    Raises:
        PlanError: it is another one.
    """
    sites = family_of(loaded.model.config).sites(loaded.model.config)
    changed_sites(plan, sites)
    return planned_digest(plan, loaded, sites)


def healing_windows(
    text: CalibrationText | None,
    plan: Plan,
    loaded: Loaded,
    digest: str,
    seed: int,
    ranks: Ranks = ALONE,
    progress: bool = True,
    labels: bool = False,
) -> HealingText:
    """What is healed on, written by the dense model where that is asked for.

    Args:
        digest: of the dense model.
        labels: whether the text's own tokens are learned.

    Raises:
        GacError: the text cannot be used.
    """

    def written(windows: int, length: int, beside: Sequence[Windows]) -> Windows:
        return own_windows(loaded.model, loaded.tokenizer, digest, windows, length, seed, beside, ranks, progress)

    return healing_text(text, plan, loaded, written, labels)


def heal_model(
    model: Any,
    plan: Plan,
    loaded: Loaded,
    given: Any,
    text: CalibrationText | None,
    work: Work,
    ranks: Ranks,
    begun: float,
    progress: bool,
) -> tuple[PlannedModel, Ended]:
    """The healed model, its plan saying so, and how that went; the model is changed in place.

    Args:
        model: the compressed one, and ``plan`` what it carries.
        loaded: the dense one, as ``given`` by the caller.
        begun: when the work started, by ``time.monotonic``.

    Raises:
        HealingError: nothing was won, and the model is as it was; or a loss was not finite, and it is as it was best.
        GacError: the models do not belong together, or the text cannot be used.
    """
    digest = origin_digest(plan, loaded)
    found = healing_windows(text, plan, loaded, digest, work.seed, ranks, progress, work.labels > 0)
    with in_basis(plan.recipe, loaded, given):
        dense = loaded.model
        before = _divergence(model, dense, found, ranks)
        ids = {name: getattr(found, name) for name in ("train", "read", "held", "given", "held_given")}
        state = StateFile(key_of(model, digest, ids, work))
        fixed: dict[str, Any] = {"state": state, "ranks": ranks, "begun": begun, "progress": progress}
        healing = partial(Healing, plan=plan, text=found, work=work, **fixed)
        numbers = sum(one.params for one in plan.weights if work.dense or one.changed)
        with frozen(dense), frozen(model):
            in_parts = wanted(model, numbers, ranks)
            ended = run_in_parts(healing, model, dense) if in_parts else run(healing(model=model, dense=dense))
        after = _divergence(model, dense, found, ranks) if ended.won else before
        state.remove()  # a run that is killed before this goes on
        if not ended.won:
            raise ended.failure or _nothing_won(ended, work)
    healed = Healed(
        texts=found.names,
        windows=len(found.train),
        window_tokens=int(found.train.shape[1]),
        held=len(found.held),
        tokens=ended.tokens,
        learning_rate=work.learning_rate,
        seed=work.seed,
        before=before,
        after=after,
        blocks=work.blocks,
        dense=work.dense,
        labels=work.labels,
        asked=work.tokens or 0,
        documents=found.documents,
        bos=found.bos,
    )
    minutes, lost = (time.monotonic() - begun) / 60, f"divergence {before:.4f} -> {after:.4f} nats a token"
    logger.info("healed in %.1f minutes: %s, on text held out", minutes, lost)
    if work.labels and after > before:
        less = "the model is less like the dense one than before"
        logger.warning("%s: labels=%g made it learn the text", less, work.labels)
    return attach_plan(model, replace(plan, healed=(*plan.healed, healed))), ended


def _divergence(model: Any, dense: Any, text: HealingText, ranks: Ranks) -> float:
    with frozen(model), frozen(dense):
        return mean_loss(model, dense, text.held, windows_at_once(model, text.held.shape[1], ranks), ranks=ranks)


def _nothing_won(ended: Ended, work: Work) -> HealingError:
    looked = [one.held for one in ended.curve if one.phase == "model"]
    if not looked:
        length = f"{work.tokens:,} tokens" if work.minutes is None else f"{work.minutes:g} minutes"
        return HealingError(
            f"{length} with blocks={work.blocks:g}: no step of the whole model, and layers by themselves won nothing",
            "a loss on text held out that falls",
            "Heal for longer, or with a smaller part for single layers.",
        )
    least, rate = f"{min(looked):.4f} nats a token at the least", work.learning_rate
    return HealingError(
        f"loss on text held out that went from {ended.start:.4f} to {least}, with learning_rate={rate:g}",
        "one that falls",
        f"Heal with learning_rate={rate / 4:.2g}, for longer, or on more text.",
    )
