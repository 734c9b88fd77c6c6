"""The loss of a plan on each of its calibration texts, and the weights of texts that balance these losses.

The model is run with the plan's modules, before they are fitted again, on some windows of each text. Its divergences
from the dense model say how the predicted loss is spread over the texts. Quantised weights are rounded without
feedback there.

Where experts go and no other weights are rounded, these modules are those of the compressed model, but for a refit of
other weights. So there the loss that each text is seen to have replaces what was predicted: the sum of the losses of
layers was 1.5 to 2.4 times as high (results/experts.md).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, fsum
from statistics import fmean

import torch
from torch import nn

from gac.compression.apply import build_modules, changed_sites, planned_sites
from gac.compression.rounding import store
from gac.forms.planned_sites import targeted_sites
from gac.measurement.calibration import CalibrationRun, decoder_layers, group_by_layer
from gac.measurement.curves import fit_layers
from gac.measurement.runs import TOKENS, ModelRuns, sampled, window_loss
from gac.measurement.text import Windows
from gac.models.examples import TokenWindows, predicted_tokens
from gac.models.families import family_of
from gac.models.modules import frozen, input_device
from gac.models.plain import is_in_memory
from gac.plan.evidence import CalibrationPart
from gac.plan.plan import Plan, TextPrediction
from gac.schemes import scheme_named

logger = logging.getLogger("gac")

CPU_TOKENS = 2048
"""Tokens of a text that are run on a CPU; on a GPU ``gac.measurement.runs.TOKENS``."""
ROUNDS = 6
"""Plans of which the one with the least loss on its worst text is taken."""
EVEN = 0.02
"""No further weights are tried once the worst text loses at most this share more than the mean."""
RATE = 2.0
"""A text that loses twice the mean gets a share that is larger by a factor of e to this."""

Choose = Callable[[Sequence[float]], tuple[Plan, CalibrationRun]]
"""Makes the plan for some weights of the texts; () for those that the recipe asks for."""


def least_worst(choose: Choose) -> Plan:
    """Search for the weights of the texts whose plan loses least on its worst text, by multiplicative updates.

    What was stored for other weights is deleted; the moments of the texts are kept.
    """
    plan, run = best, best_run = choose(())
    for _ in range(ROUNDS - 1):
        losses = _losses(plan)
        if (mean := fmean(losses)) <= 0 or max(losses) <= (1 + EVEN) * mean:
            break
        parts = plan.measured.calibration.parts
        updated = [_share(part) * exp(RATE * (loss / mean - 1)) for part, loss in zip(parts, losses, strict=True)]
        scale = fsum(map(_share, parts)) / fsum(updated)
        plan, run = choose([scale * share / part.windows for part, share in zip(parts, updated, strict=True)])
        logger.info("balancing texts: %s", _described(plan))
        if max(_losses(plan)) < max(_losses(best)):
            best, run, best_run = plan, best_run, run
        if run.ranks.leads:
            run.store.delete()
    return best


def _losses(plan: Plan) -> list[float]:
    """Return the predicted losses on the calibration texts, without that on a check text."""
    return [by.loss for by in plan.prediction.by_text[: len(plan.measured.calibration.parts)]]


def _described(plan: Plan) -> str:
    texts = zip(plan.measured.calibration.parts, _losses(plan), strict=True)
    return ", ".join(f"{part.text} with weight {part.weight:.3g} loses {loss:.4f}" for part, loss in texts)


def _share(part: CalibrationPart) -> float:
    return part.weight * part.windows


def with_predictions(run: CalibrationRun, plan: Plan, check: Windows | None = None) -> Plan:
    """Add the predicted loss on each of several calibration texts, and on a text that is not calibrated on.

    The mean of the first, by their weights, is the predicted loss of the plan.

    Args:
        run: the calibration behind the plan. Where its model is offloaded, nothing is added.
        check: windows of that other text.
    """
    as_compressed = _as_compressed(plan)
    if not run.texts and check is None and not as_compressed:
        return plan
    if not is_in_memory(run.model):
        logger.info("no loss is predicted by text, for the model is not all in memory")
        return plan
    texts, modules = _texts(run, plan, check), _modules(run, plan)
    losses = run.ranks.once(lambda: _losses_by_run(run, texts, modules, on_text=as_compressed))
    shares, prediction = [text.share for text in texts], plan.prediction
    mean = fsum(map(float.__mul__, shares, losses)) / fsum(shares)
    if as_compressed:
        losses, total = [loss + prediction.head for loss in losses], mean + prediction.head
        perplexity, beyond = prediction.dense_perplexity * exp(total), mean - prediction.summed
        prediction = replace(prediction, loss=total, perplexity=perplexity, together=beyond)
    else:
        losses = [prediction.loss * (loss / mean if mean else 1.0) for loss in losses]
    by_text = tuple(
        TextPrediction(text.name, loss, exp(text.dense_loss), exp(text.dense_loss + loss))
        for text, loss in zip(texts, losses, strict=True)
    )
    return replace(plan, prediction=replace(prediction, by_text=by_text if run.texts else by_text[1:]))


def _as_compressed(plan: Plan) -> bool:
    rounded = any(scheme_named(each.scheme).lossy and not each.weight.is_routed for each in plan.weights)
    return not rounded and any(each.weight.experts and each.form != "dense" for each in plan.weights)


@dataclass(frozen=True, eq=False)
class _Text:
    """Windows of a text, some of them, its part of the calibration, and the dense model's loss on it, nats a token."""

    name: str
    windows: TokenWindows
    sampled: TokenWindows
    share: float
    dense_loss: float


def _texts(run: CalibrationRun, plan: Plan, check: Windows | None) -> list[_Text]:
    """List the calibration texts, also a single one, and the check text."""
    calibration, texts = plan.measured.calibration, list[_Text]()
    tokens = CPU_TOKENS if input_device(run.model).type == "cpu" else TOKENS
    numbers = [text.windows for text in run.texts] or [tuple(range(len(run.windows)))]
    for part, of_text in zip(calibration.texts, numbers, strict=True):
        loss = calibration.loss if part.loss is None else part.loss
        windows = run.windows[list(of_text)]
        texts.append(_Text(part.text, windows, sampled(windows, tokens), _share(part), loss))
    if check is not None:
        windows = sampled(check.ids, tokens)
        with frozen(run.model), torch.no_grad():
            losses = [float(window_loss(run.model, ids, f"a window of {check.name}")) for ids in windows]
        texts.append(_Text(check.name, check.ids, windows, 0.0, fsum(losses) / predicted_tokens(windows)))
    return texts


def _modules(run: CalibrationRun, plan: Plan) -> dict[str, nn.Module]:
    sites = planned_sites(plan, targeted_sites(run.model.config, plan.recipe.space.forms))
    changed = changed_sites(plan, sites)
    layers = {site.layer for site in changed}
    fits = fit_layers(run, [site for site in sites if site.layer in layers], forms=plan.recipe.space.forms)
    modules = build_modules(run, plan.weights, changed, fits)
    schemes = {choice.name: scheme_named(choice.scheme) for choice in plan.weights}
    return {name: store(schemes[name], module) for name, module in modules.items()}


def _losses_by_run(
    run: CalibrationRun, texts: Sequence[_Text], modules: Mapping[str, nn.Module], on_text: bool
) -> list[float]:
    """Return the loss of each text with the modules (``ModelRuns.lost``), or the divergence on some of its windows."""
    if not modules:
        return [0.0] * len(texts)
    layers = decoder_layers(run.model, group_by_layer(family_of(run.model.config).sites(run.model.config)))
    if on_text:
        return [ModelRuns(run.model, layers, text.windows, []).lost(modules) for text in texts]
    return [ModelRuns(run.model, layers, text.sampled, [], every=True).divergence(modules) for text in texts]
