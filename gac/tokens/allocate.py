"""From a model and a press to a plan of tokens kept, and from that to a press."""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gac.allocation.knapsack import Group, knapsack
from gac.allocation.problem import floored
from gac.arguments import Count, checked
from gac.arrays import Floats
from gac.errors import BudgetError, ModelError, TextError
from gac.evaluation.protocol import check_positions
from gac.io import home
from gac.measuring import dense_model, targeted_digest
from gac.models.families import family_of
from gac.models.loading import check_finite, check_in_memory
from gac.models.threads import one_call_at_a_time
from gac.sensitivity.text import check_vocabulary
from gac.sensitivity.texts import CalibrationText, Texts
from gac.tokens.attending import attentions, sliding_layers
from gac.tokens.defaults import FOLLOWING, KEEP, PRESS, SHARES, STEP, TEXT
from gac.tokens.losses import measure_losses
from gac.tokens.plan import SCHEMA, LayerTokens, TokenPlan
from gac.tokens.presses import VERSION, press_of
from gac.version import __version__

if TYPE_CHECKING:
    from gac.tokens.composed import PlannedPress


@checked
@one_call_at_a_time
def allocate_tokens(
    model: PreTrainedModel | str | Path,
    keep: float = KEEP,
    *,
    press: Any = PRESS,
    calibration: CalibrationText = TEXT,
    following: Count = FOLLOWING,
    shares: Sequence[float] = SHARES,
    step: Count = STEP,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    progress: bool = True,
) -> TokenPlan:
    """Choose how many tokens of a context the cache of every layer keeps: the least loss within the limit.

    Every layer is cut by itself to each share of the context, by the press. What that loses is the divergence from
    the dense model on the tokens that follow (``gac.tokens.losses`` has the equation). One share a layer is chosen by
    the exact knapsack, so that the summed loss is least. What is measured is kept in ``GAC_HOME`` window by window.

    Args:
        model: a loaded transformers causal LM, a local directory, a hub id, or ``"smollm2"``.
        keep: kept fraction of all layers' tokens, in (0, 1].
        press: of kvpress, by name (``"snapkv"``, ``"expectedattention"``, ``"knorm"``, ...) or as an object, with a
            ratio for each layer.
        calibration: as for ``allocate``; each window is a context and the tokens that follow it.
        following: how many tokens these are.
        shares: of the context, in (0, 1), that are priced; to keep all is always a choice.
        step: budgets are multiples of it, for the sake of kernels; shares are rounded down to it.
        tokenizer: as for ``allocate``.
        progress: show a progress bar.

    Raises:
        BudgetError: a fraction outside (0, 1], a share that leaves no token, or a limit below the smallest shares.
        ModelError: windows longer than the model has positions, or no layer that a press can cut.
        GacError: kvpress cannot be imported, the press has no ratios by layer, or the model or text is not usable.
    """
    chosen, name, options = press_of(press)
    texts = Texts.of(calibration)
    context = texts.length - following
    budgets = _budgets(keep, shares, step, context, following)
    loaded = dense_model(model, tokenizer)
    check_positions(loaded.model, texts.length, "contexts with the tokens that follow them")
    check_in_memory(loaded.model, ", with a press", "where the model runs as it is", "")
    check_finite(loaded.model)
    whole = sliding_layers(loaded.model.config)
    layers = [layer for layer in range(len(attentions(loaded.model))) if layer not in whole]
    if not layers:
        raise ModelError(
            f"a {loaded.model.config.model_type} whose layers all attend within a sliding window",
            "a layer that attends to the whole context",
            "Keep all tokens: such a cache does not grow beyond the window.",
        )
    windows = texts.cut(loaded.tokenizer)
    check_vocabulary(windows, loaded.model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    digest = targeted_digest(loaded, family_of(loaded.model.config).sites(loaded.model.config))
    measured_as = (digest, loaded.model.dtype, windows.digest, following, name, sorted(options.items()), budgets)
    kept = home() / "tokens" / hashlib.sha256(repr((VERSION, *measured_as)).encode()).hexdigest()[:32]
    losses = measure_losses(loaded.model, windows.ids, chosen, layers, budgets, following, kept, progress)
    return TokenPlan(
        schema_version=SCHEMA,
        gac_version=__version__,
        model=loaded.name,
        digest=digest,
        family=loaded.model.config.model_type,
        press=name,
        options=options,
        text=texts.name,
        text_digest=windows.digest,
        windows=len(windows),
        context=context,
        following=following,
        step=step,
        keep=keep,
        whole=whole,
        **_decided(layers, [*budgets, context], np.pad(losses, ((0, 0), (0, 1))), floored(keep, len(layers) * context)),
    )


def press(plan: TokenPlan | str | Path) -> "PlannedPress":
    """The press of kvpress that evicts what a plan says: ``with gac.press(plan)(model): model.generate(ids)``.

    Args:
        plan: of ``allocate_tokens``, or the path of one.

    Raises:
        PlanError: the plan cannot be read.
        GacError: kvpress cannot be imported.
    """
    opened = TokenPlan.opened(plan)
    press_of(opened.press, opened.options)
    from gac.tokens.composed import PlannedPress

    return PlannedPress(opened)


def _budgets(keep: float, shares: Sequence[float], step: int, context: int, following: int) -> list[int]:
    """The priced numbers of tokens, fewest first, but for all of them."""
    if context < step:
        given = f"windows of {context + following} tokens, of which {following} follow the context"
        raise TextError(given, f"{step + following} or more", f"Ask for longer windows: {TEXT}.")
    for fraction in (keep, *shares):
        if not (math.isfinite(fraction) and 0 < fraction <= 1):
            raise BudgetError(f"a kept fraction of {fraction:g}", "one above 0, up to 1", "Keep half: 0.5.")
    found = {share: floored(share, context) // step * step for share in shares if share < 1}
    for share, tokens in found.items():
        if not tokens:
            given = f"a share of {share:g} of {context} tokens in steps of {step}, which leaves no token"
            raise BudgetError(given, f"{step / context:.4g} or more", "Give larger shares, or a smaller step.")
    return sorted(set(found.values()))


def _decided(layers: Sequence[int], budgets: Sequence[int], losses: Floats, limit: int) -> dict[str, Any]:
    """One budget a layer, with the proof.

    Args:
        losses: shape ``(layers, budgets)``.
    """
    costs = [[tokens] for tokens in budgets]
    groups = [Group(f"layer {layer}", own, costs) for layer, own in zip(layers, losses, strict=True)]
    solution = knapsack(groups, [limit], names=["the limit of tokens kept in all layers"])
    priced = [tuple(zip(budgets, own.tolist(), strict=True)) for own in losses]
    chosen = zip(layers, solution.choice, priced, strict=True)
    return {
        "limit": limit,
        "certificate": solution.certificate,
        "layers": tuple(LayerTokens(layer, budgets[item], own) for layer, item, own in chosen),
    }
