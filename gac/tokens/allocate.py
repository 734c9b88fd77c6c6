"""From a model and a press to a plan of tokens kept, and from that to a press."""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gac.core.arguments import Count, checked
from gac.core.errors import BudgetError, ProfileError, TextError
from gac.core.io import home
from gac.core.version import __version__
from gac.core.workloads import Workload
from gac.measurement.session import load_dense_model, targeted_digest
from gac.measurement.text import check_positions, check_vocabulary
from gac.measurement.texts import CalibrationText, Texts
from gac.models.attentions import cut_layers, heads_of, sliding_layers, window_of
from gac.models.families import family_of
from gac.models.loading import check_finite, check_in_memory
from gac.models.threads import one_call_at_a_time
from gac.plan.costs import floored
from gac.plan.evidence import ProfileUsed
from gac.plan.token_plan import SCHEMA, TokenPlan, kept_of
from gac.profiling.select import select_profile
from gac.profiling.table import Profile
from gac.tokens.attending import attentions
from gac.tokens.decide import TimeLimit, decide
from gac.tokens.defaults import FOLLOWING, KEEP, PRESS, SHARES, STEP, TEXT
from gac.tokens.latencies import Attending, decoding, limited
from gac.tokens.losses import measure_losses
from gac.tokens.presses import VERSION, press_of

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
    profile: Profile | str | Path | None = None,
    workloads: Sequence[str] | None = None,
    latency: float | dict[str, float] | None = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    progress: bool = True,
) -> TokenPlan:
    """Choose how many tokens of a context the cache of every layer keeps: the least loss within the limit.

    Every layer is cut by itself to each share of the context, by the press. What that loses is the divergence from
    the dense model on the tokens that follow (``gac.tokens.losses`` has the equation). One share a layer is chosen by
    the exact knapsack, so that the summed loss is least. What is measured is kept in ``GAC_HOME`` window by window.
    The plan says what attention over the tokens that stay takes, where the latency table has it.

    Args:
        model: a loaded transformers causal LM, a local directory, a hub id, or ``"smollm2"``.
        keep: kept fraction of all layers' tokens, in (0, 1].
        press: of kvpress, by name (``"snapkv"``, ``"expectedattention"``, ``"knorm"``, ...) or as an object, with a
            ratio for each layer.
        calibration: as for ``allocate``; each window is a context and the tokens that follow it.
        following: how many tokens these are.
        shares: of the context, in (0, 1), that are priced; to keep all is always a choice.
        step: budgets are multiples of it, for the sake of kernels; shares are rounded down to it.
        profile: as for ``allocate``; where this GPU has no table, latencies are unknown.
        workloads: ``decode:B@C``, whose latency of attention over the cache the plan says; a layer keeps its share of
            C. None: one text, with the context that is priced.
        latency: allowed fraction of that latency in the dense model, all layers together: one for all workloads, or by
            workload. Budgets whose latency the table lacks are then no choice.
        tokenizer: as for ``allocate``.
        progress: show a progress bar.

    Raises:
        BudgetError: a fraction outside (0, 1], a share that leaves no token, or a limit below the smallest shares.
        ModelError: windows or contexts longer than the model has positions, or no layer that a press can cut.
        ProfileError: the table cannot be read, or a latency is limited that it lacks.
        GacError: kvpress cannot be imported, the press has no ratios by layer, a workload is none, or the model or text
            is not usable.
    """
    chosen, name, options = press_of(press)
    texts = Texts.of(calibration)
    context = texts.length - following
    budgets = [*_budgets(keep, shares, step, context, following), context]
    runs = decoding([f"decode:1@{context}"] if workloads is None else workloads)
    limits = limited(latency, runs)
    for fraction in limits.values():
        _check_fraction(fraction, "latency")
    table, used = _table(profile, bool(limits))
    loaded = load_dense_model(model, tokenizer)
    config = loaded.model.config.get_text_config()
    _check_contexts(loaded.model, texts.length, runs, budgets, step)
    _check_keep(keep, len(cut_layers(config)), budgets)
    check_in_memory(loaded.model, ", with a press", "where the model runs as it is", "")
    check_finite(loaded.model)
    attentions(loaded.model)
    layers, whole = cut_layers(config), sliding_layers(config)
    attending = Attending(heads_of(config), table, len(layers), len(whole), window_of(config))
    times = [TimeLimit.of(attending, run, limits[str(run)], budgets, step) for run in runs if str(run) in limits]
    windows = texts.cut(loaded.tokenizer)
    check_vocabulary(windows, loaded.model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    digest = targeted_digest(loaded, family_of(loaded.model.config).sites(loaded.model.config))
    measured_as = (digest, loaded.model.dtype, windows.digest, following, name, sorted(options.items()), budgets[:-1])
    kept = home() / "tokens" / hashlib.sha256(repr((VERSION, *measured_as)).encode()).hexdigest()[:32]
    losses = measure_losses(loaded.model, windows.ids, chosen, layers, budgets[:-1], following, kept, progress)
    decision = decide(layers, budgets, np.pad(losses, ((0, 0), (0, 1))), floored(keep, len(layers) * context), times)
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
        limit=decision.limit,
        certificate=decision.certificate,
        layers=decision.layers,
        heads=attending.heads,
        workloads=tuple(attending.together(run, decision.kept(run, context, step)) for run in runs),
        latency=limits,
        profile=used,
        whole=whole,
        window=attending.window,
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
        _check_fraction(fraction, "kept")
    found = {share: floored(share, context) // step * step for share in shares if share < 1}
    for share, tokens in found.items():
        if not tokens:
            given = f"a share of {share:g} of {context} tokens in steps of {step}, which leaves no token"
            raise BudgetError(given, f"{step / context:.4g} or more", "Give larger shares, or a smaller step.")
    return sorted(set(found.values()))


def _check_keep(keep: float, layers: int, budgets: Sequence[int]) -> None:
    """Refuse, before anything is measured, a limit below the smallest budgets of all layers."""
    if floored(keep, layers * budgets[-1]) < layers * budgets[0]:
        given = f"a kept fraction of {keep:g} of {budgets[-1]:,} tokens in each of {layers} layers"
        least = math.ceil(budgets[0] / budgets[-1] * 10_000) / 10_000
        expected = f"{least:.4f} or more: {budgets[0]} tokens in each are the smallest share"
        raise BudgetError(given, expected, "Keep more, or give a smaller share or step.")


def _check_fraction(fraction: float, what: str) -> None:
    if not (math.isfinite(fraction) and 0 < fraction <= 1):
        raise BudgetError(f"a {what} fraction of {fraction:g}", "one above 0, up to 1", "Give a half: 0.5.")


def _check_contexts(
    model: PreTrainedModel, length: int, runs: Sequence[Workload], budgets: Sequence[int], step: int
) -> None:
    """Refuse, before anything is measured, contexts that the model has no positions for, or of which nothing stays.

    Args:
        length: of a window.
        budgets: of the priced context, which is the last of them.
    """
    check_positions(model, length, "contexts with the tokens that follow them")
    for run in runs:
        check_positions(model, run.tokens, "contexts to decode after")
        kept_of(budgets[0], budgets[-1], run.tokens, step)


def _table(asked: Profile | str | Path | None, limited: bool) -> tuple[Profile | None, ProfileUsed | None]:
    """The latency table and its record; none where this GPU has none yet and nothing needs it."""
    try:
        return select_profile(asked)
    except ProfileError:
        if asked is not None or limited:
            raise
        return None, None
