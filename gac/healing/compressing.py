"""The last part of compression: some seconds of distillation on the calibration text, where a GPU has room for it."""

import logging
import time
from dataclasses import dataclass
from typing import Any

from gac.checkpoint.planned import PlannedModel
from gac.core.distributed.ranks import Ranks
from gac.core.errors import TextError
from gac.healing.heal import distil, trained_numbers
from gac.healing.records import TOKENS, TrainingBudget, default_rate
from gac.healing.sharding import fits
from gac.healing.text import HealingText, calibrated_text
from gac.measurement.text import Windows
from gac.models.loading import Loaded
from gac.plan.plan import Plan
from gac.schemes import scheme_named

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Healing:
    """A distillation to come: its text, and the tokens to train on."""

    text: HealingText
    tokens: int

    def run(self, model: Any, dense: Any, plan: Plan, digest: str, ranks: Ranks, show_progress: bool) -> PlannedModel:
        """Train the compressed model, and return it; unchanged if the loss on held-out text does not fall.

        ``dense`` is the model with this digest, in the basis of the plan.
        """
        rate = default_rate(plan.measured.params)
        budget = TrainingBudget(None, self.tokens, rate, 0.0, False, 0.0, plan.recipe.measure.seed)
        start = time.monotonic()
        healed, result = distil(
            model, dense, plan, digest, self.text, budget, ranks, start, show_progress, compressing=True
        )
        if result.failure is not None:
            logger.warning("healing ended early: %s", result.failure)
        if not result.progress.improved:
            logger.warning("healing on %s tokens won nothing on held-out text: left out", f"{self.tokens:,}")
        return healed


def prepared(tokens: int | None, plan: Plan, loaded: Loaded, windows: Windows, ranks: Ranks) -> Healing | None:
    """Cut the text; None where nothing is to be healed.

    Args:
        tokens: to train on. None: ``TOKENS`` on a GPU with room for a copy of the dense model and the state of
            training; none elsewhere, which is logged.
        windows: those of calibration.

    Raises:
        TextError: the text has too few windows for the ``tokens`` that were asked for.
    """
    if tokens == 0 or not any(choice.changed for choice in plan.weights):
        return None
    if tokens is None and (obstacle := _obstacle(plan, loaded.model, ranks)) is not None:
        logger.info("not healed: %s; heal=%d (--heal %d) heals all the same, gac heal later", obstacle, TOKENS, TOKENS)
        return None
    calibration = plan.measured.calibration
    try:
        text = calibrated_text(windows, loaded, calibration.bos, calibration.documents)
    except TextError as failure:
        if tokens is not None:
            raise
        logger.info("not healed: %s", failure)
        return None
    return Healing(text, TOKENS if tokens is None else tokens)


def _obstacle(plan: Plan, model: Any, ranks: Ranks) -> str | None:
    """Return why the model is not healed by default; the same in every process."""
    if any(scheme_named(choice.scheme).lossy for choice in plan.weights):
        return "its weights are rounded to few bits"
    devices = {parameter.device for parameter in model.parameters()}
    if any(device.type != "cuda" for device in devices):
        return "it takes long on a CPU"
    if len(devices) > 1:
        return f"the model lies on {len(devices)} GPUs"
    trained = trained_numbers(plan, dense=False)
    free = fits(trained, devices.pop(), reserved=model.get_memory_footprint())
    return None if all(ranks.gathered(free)) else f"one GPU has no room to train {trained:,} parameters"
