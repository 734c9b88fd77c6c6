"""Compare a text with the calibration text by the dense model's loss and by the inputs of its weights."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import exp
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from gac.core.errors import TextError
from gac.core.progress import progress_bar
from gac.measurement.documents import Documents, Text
from gac.measurement.runs import window_loss
from gac.measurement.text import Windows, check_vocabulary, evaluation_windows
from gac.measurement.texts import Texts
from gac.models.modules import frozen, listening
from gac.models.sites import Site

logger = logging.getLogger("gac")

FAR = 1.4
"""Above this spread a text is called unlike; ``docs/allocate.md`` has what was measured."""
_WINDOWS = 16
_FEATURES = 256
_DAMPING = 0.1


def compare_texts(
    model: nn.Module, tokenizer: Any, sites: Sequence[Site], texts: Texts, windows: Windows, check: Text, progress: bool
) -> float:
    """Measure how like the calibration text another text is, log it, and warn where it is far; return the spread.

    The spread is that of the second moments of what weights read in the check text, beside those in one half of the
    calibration windows, tr(A_check A_half^-1), in units of what the other half has; the mean over the weights. At 1
    the check text is as like the calibration text as that is like itself.

    It takes one run of the model over at most 16 windows of each text, and keeps at most 256 features of each weight.

    Raises:
        TextError: the check text is calibrated on, cannot be read or is too short, or there is one calibration window.
        ModelError: a loss is not finite.
    """
    if windows.examples is not None:
        problem = f"a check text beside {windows.name}, with images"
        raise TextError(problem, "calibration text without images", "Leave the check text out.")
    other, sample = check_windows(model, tokenizer, texts, windows, check), _spaced(windows)
    names = [weight.name for site in sites for weight in site.weights]
    bar = progress_bar("comparing texts", "window", len(sample) + len(other), shown=progress, leave=False)
    with bar, frozen(model), torch.no_grad():
        halves = [_measured(model, names, replace(sample, ids=sample.ids[start::2]), bar) for start in (0, 1)]
        check_loss, read = _measured(model, names, other, bar)
    loss = sum(half * len(sample.ids[start::2]) for start, (half, _) in enumerate(halves)) / len(sample)
    (_, half), (_, rest) = halves
    spread = sum(moment_ratio(half[name], read[name], rest[name]) for name in names) / len(names)
    logger.info(
        "%s beside %s (%d and %d windows): the dense model's loss is %.3f and %.3f nats a token (perplexity %.1f and "
        "%.1f); what weights read spreads %.2f times as far as the calibration text does (1: alike)",
        *(other.name, windows.name, len(other), len(sample), check_loss, loss, exp(check_loss), exp(loss), spread),
    )
    if spread > FAR:
        logger.warning(
            "warning: %s is unlike the calibration text (%.2f; above %g is far): the model will lose more on it than "
            "the plan predicts. Calibrate on such text too: several texts can be given.",
            *(other.name, spread, FAR),
        )
    return spread


def check_windows(model: nn.Module, tokenizer: Any, texts: Texts, windows: Windows, check: Text) -> Windows:
    """Windows of the check text like those of the calibration, spread over all of it."""
    text = check if isinstance(check, str) else Documents.of(check)
    cut = evaluation_windows(text, tokenizer, length=windows.length, bos=windows.bos == "windows")
    same = isinstance(text, str) and os.path.realpath(text) in {os.path.realpath(part.name) for part in texts.parts}
    known = {row.numpy().tobytes() for row in windows.ids}
    if same or any(row.numpy().tobytes() in known for row in cut.ids):
        problem = f"the check text {cut.name}, which is calibrated on"
        raise TextError(problem, "another text, like what the model will serve", "Check with a text that is held back.")
    if len(windows) < 2:
        problem, expected = "a check beside 1 calibration window", "at least 2, each half of which is compared"
        raise TextError(problem, expected, "Calibrate on more windows.")
    check_vocabulary(cut, model)
    return _spaced(cut)


def moment_ratio(half: Tensor, check: Tensor, rest: Tensor) -> float:
    """tr(check half^-1) / tr(rest half^-1), each feature in units of its mean square in ``half``, which is damped."""
    scale = half.diagonal().clamp_min(torch.finfo(half.dtype).tiny).rsqrt()
    half, check, rest = (moment * scale[:, None] * scale for moment in (half, check, rest))
    damped = half + _DAMPING * torch.eye(len(half), dtype=half.dtype, device=half.device)
    inverse = torch.linalg.inv(damped)
    return float((inverse * check).sum() / (inverse * rest).sum())


def _spaced(windows: Windows) -> Windows:
    count = min(len(windows), _WINDOWS)
    indices = torch.linspace(0, len(windows) - 1, count, dtype=torch.float32).round().long()
    return replace(windows, ids=windows.ids[indices])


def _measured(
    model: nn.Module, names: Sequence[str], text: Windows, bar: "tqdm[Any]"
) -> tuple[float, Mapping[str, Tensor]]:
    """Mean loss on the windows, and mean second moments of evenly spaced input features of each weight."""
    sums: dict[str, Tensor] = {}

    def listen(name: str, _module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        x = inputs[0].reshape(-1, inputs[0].shape[-1])
        x = x[:, :: -(-x.shape[1] // _FEATURES)].float()
        sums[name] = sums.get(name, 0) + x.T @ x

    with listening(model, {name: partial(listen, name) for name in names}):
        loss = 0.0
        for ids in text.ids:
            loss += float(window_loss(model, ids, f"a window of {text.name}"))
            bar.update()
    moments = {name: moment.double() / text.ids.numel() for name, moment in sums.items()}
    return loss / (text.ids.numel() - len(text)), moments
