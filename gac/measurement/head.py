"""Loss of quantising the embedding and the LM head, by running the model with nothing else changed."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from gac.core.linalg import check_measured
from gac.core.progress import progress_bar
from gac.measurement.calibration import CalibrationRun
from gac.measurement.runs import diverged, sampled
from gac.measurement.store import read_tensors, write_tensors
from gac.models.modules import frozen, run_on, swapped

_LOSS = "loss"


def measure_head(run: CalibrationRun, scheme: str, rounded: Callable[[], Mapping[str, nn.Module]]) -> float:
    """The mean divergence of what the model predicts with them, nats a token; read where it is in the store.

    Args:
        scheme: the name of what they are rounded to.
        rounded: makes what stands in their place, by name.

    Raises:
        ModelError: it is not finite.
        StatisticsError: what is kept cannot be written or read.
    """
    return run.ranks.once(partial(_stored_or_measured, run, scheme, rounded))


def _stored_or_measured(run: CalibrationRun, scheme: str, rounded: Callable[[], Mapping[str, nn.Module]]) -> float:
    path = None if run.store is None else run.store.measured(f"head-{scheme}", 0)
    if path is not None and path.exists():
        return float(read_tensors(path, torch.device("cpu"))[_LOSS])
    loss = _measured(run, rounded())
    if path is not None:
        write_tensors(path, {_LOSS: loss})
    return float(loss)


def _measured(run: CalibrationRun, modules: Mapping[str, nn.Module]) -> Tensor:
    """Run window by window, so that two sets of predictions are alive at most; float64."""
    windows, losses = sampled(run.windows), []
    with frozen(run.model), torch.no_grad():
        for ids in progress_bar("rounding the head", "window", steps=windows, shown=run.progress):
            dense = _predicted(run.model, ids)
            with swapped(run.model, modules):
                losses.append(diverged(dense, _predicted(run.model, ids)))
    loss = torch.stack(losses).double().mean().clamp_min(0)
    check_measured(loss, "the divergence with embedding and head rounded is not finite", "a finite one")
    return loss


def _predicted(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probabilities of every next token, ``(tokens, vocabulary)``."""
    logits: Tensor = run_on(model, ids[None]).logits[0]
    return logits.float().log_softmax(-1)
