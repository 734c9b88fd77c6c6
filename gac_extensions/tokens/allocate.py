"""Make a plan of tokens from a model and a press, and a press from a plan."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from gac.core.arguments import Count
from gac.core.arrays import Floats
from gac.core.errors import BudgetError, ProfileError, TextError
from gac.core.io import home
from gac.core.progress import progress_bar
from gac.core.version import __version__
from gac.evaluation.perplexity import window_divergences
from gac.measurement.session import load_dense_model, targeted_digest
from gac.measurement.store import read_arrays, write_tensors
from gac.measurement.text import check_positions, check_vocabulary
from gac.measurement.texts import CalibrationText, Texts
from gac.models.attentions import heads_of, sliding_layers
from gac.models.families import family_of
from gac.models.modules import frozen, input_device
from gac.models.plain import check_finite, check_in_memory
from gac.models.threads import entry_point
from gac.plan.costs import floored
from gac.plan.evidence import ProfileUsed
from gac.profiling.select import select_profile
from gac.profiling.table import Profile
from gac_extensions.tokens.attending import Prefill, attending, attentions
from gac_extensions.tokens.decide import AttentionLatency, TimeLimit, decide, decode_workloads, latency_fractions
from gac_extensions.tokens.defaults import FOLLOWING, KEEP, PRESS, SHARES, STEP, TEXT
from gac_extensions.tokens.layers import cut_layers, window_of
from gac_extensions.tokens.plan import SCHEMA, TokenPlan, kept_of
from gac_extensions.tokens.presses import VERSION, evicted, kvpress, press_of

if TYPE_CHECKING:
    from gac_extensions.tokens.planned_press import PlannedPress


@entry_point()
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

    The press cuts one layer at a time to each share of the context. The loss of a cut is the divergence from the dense
    model on the tokens that follow (equation in ``measure_losses``). The exact knapsack chooses one share a layer
    with the least summed loss. Measurements are saved in ``GAC_HOME`` window by window. The plan holds the latency of
    attention over the kept tokens, if the latency table has it.

    Args:
        model: a loaded transformers causal LM, a local directory, a hub id, or ``"smollm2"``.
        keep: kept fraction of all layers' tokens, in (0, 1].
        press: of kvpress, by name (``"snapkv"``, ``"expectedattention"``, ``"knorm"``, ...) or as an object, with a
            ratio for each layer.
        calibration: as for ``allocate``; each window is a context and the tokens that follow it.
        following: number of tokens that follow.
        shares: of the context, in (0, 1), to price; keeping all is always possible.
        step: budgets are multiples of it, as kernels prefer; shares are rounded down to it.
        profile: as for ``allocate``; without a table for this GPU, latencies are unknown.
        workloads: ``decode:B@C``, for which the plan predicts attention latency; a layer keeps its share of C. None: a
            batch of one at the priced context.
        latency: allowed fraction of that latency in the dense model, summed over layers: one for all workloads, or by
            workload. Budgets whose latency the table lacks are then excluded.
        tokenizer: as for ``allocate``.
        progress: show a progress bar.

    Raises:
        BudgetError: a fraction outside (0, 1], a share that leaves no token, or a limit below the smallest shares.
        ModelError: windows or contexts longer than the model has positions, or no layer that a press can cut.
        ProfileError: the table cannot be read, or a latency is limited that it lacks.
        GacError: kvpress cannot be imported, the press has no ratios by layer, a workload is invalid, or the model or
            text is not usable.
    """
    chosen, name, options = press_of(press)
    texts = Texts.of(calibration)
    context = texts.length - following
    budgets = [*_budgets(keep, shares, step, context, following), context]
    runs = decode_workloads([f"decode:1@{context}"] if workloads is None else workloads)
    limits = latency_fractions(latency, runs)
    _check_fractions(limits.values(), "latency")
    table, used = _table(profile, bool(limits))
    loaded = load_dense_model(model, tokenizer)
    config = loaded.model.config.get_text_config()
    layers, uncut = cut_layers(config), sliding_layers(config)
    check_positions(loaded.model, texts.length, "contexts with the tokens that follow them")
    for run in runs:
        check_positions(loaded.model, run.tokens, "contexts to decode after")
        kept_of(budgets[0], context, run.tokens, step)  # raises if a layer could keep nothing
    _check_keep(keep, len(layers), budgets)
    check_in_memory(loaded.model, ", with a press", "where the model runs as it is", "")
    check_finite(loaded.model)
    attentions(loaded.model)
    timing = AttentionLatency(heads_of(config), table, len(layers), len(uncut), window_of(config))
    times = [TimeLimit.of(timing, run, limits[str(run)], budgets, step) for run in runs if str(run) in limits]
    windows = texts.cut(loaded.tokenizer)
    check_vocabulary(windows, loaded.model)
    digest = targeted_digest(loaded, family_of(loaded.model.config).sites(loaded.model.config))
    key = (VERSION, digest, loaded.model.dtype, windows.digest, following, name, sorted(options.items()), budgets[:-1])
    folder = home() / "tokens" / hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    losses = measure_losses(loaded.model, windows.ids, chosen, layers, budgets[:-1], following, folder, progress)
    limit = floored(keep, len(layers) * context)
    certificate, planned = decide(layers, budgets, np.pad(losses, ((0, 0), (0, 1))), limit, times)
    kept = {run: [kept_of(layer.kept, context, run.tokens, step) for layer in planned] for run in runs}
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
        limit=limit,
        certificate=certificate,
        layers=planned,
        heads=timing.heads,
        workloads=tuple(timing.total(run, kept[run]) for run in runs),
        latency=limits,
        profile=used,
        whole=uncut,
        window=timing.window,
    )


def press(plan: TokenPlan | str | Path) -> "PlannedPress":
    """A press of kvpress that evicts as planned: ``with gac.press(plan)(model): model.generate(ids)``.

    Args:
        plan: from ``allocate_tokens``, or the path of one.

    Raises:
        PlanError: the plan cannot be read.
        GacError: kvpress cannot be imported.
    """
    opened = TokenPlan.opened(plan)
    kvpress()  # a GacError names the way to install it
    from gac_extensions.tokens.planned_press import PlannedPress

    return PlannedPress(opened)


def _budgets(keep: float, shares: Sequence[float], step: int, context: int, following: int) -> list[int]:
    """Numbers of tokens to price, fewest first, without the full context."""
    if context < step:
        problem = f"windows of {context + following} tokens, of which {following} follow the context"
        raise TextError(problem, f"{step + following} or more", f"Ask for longer windows: {TEXT}.")
    _check_fractions((keep, *shares), "kept")
    budgets = sorted({floored(share, context) // step * step for share in shares if share < 1})
    if 0 in budgets:
        problem = f"a share of {min(shares):g} of {context} tokens in steps of {step}, which leaves no token"
        raise BudgetError(problem, f"{step / context:.4g} or more", "Give larger shares, or a smaller step.")
    return budgets


def _check_keep(keep: float, layers: int, budgets: Sequence[int]) -> None:
    if floored(keep, layers * budgets[-1]) < layers * budgets[0]:
        problem = f"a kept fraction of {keep:g} of {budgets[-1]:,} tokens in each of {layers} layers"
        least = math.ceil(budgets[0] / budgets[-1] * 10_000) / 10_000
        expected = f"{least:.4f} or more: {budgets[0]} tokens in each are the smallest share"
        raise BudgetError(problem, expected, "Keep more, or give a smaller share or step.")


def _check_fractions(fractions: Iterable[float], kind: str) -> None:
    for fraction in fractions:
        if not 0 < fraction <= 1:
            raise BudgetError(f"a {kind} fraction of {fraction:g}", "one above 0, up to 1", "Give a half: 0.5.")


def _table(profile: Profile | str | Path | None, limited: bool) -> tuple[Profile | None, ProfileUsed | None]:
    """Select the latency table and its record; none if this GPU has no table and no latency is limited."""
    try:
        return select_profile(profile)
    except ProfileError:
        if profile is not None or limited:
            raise
        return None, None


# --- losses ---------------------------------------------------------------------------------------------------------


def measure_losses(
    model: PreTrainedModel,
    windows: Tensor,
    press: Any,
    layers: Sequence[int],
    budgets: Sequence[int],
    following: int,
    folder: Path,
    progress: bool,
) -> Floats:
    """The loss of every layer at every budget, nats a token, float64 ``(layers, budgets)``.

    Of layer l and k tokens it is ``1 / (N F) sum_n sum_t KL(p(x_t) || p_lk(x_t))`` over the F tokens that follow each
    of N contexts: p is the dense model's next-token distribution, and p_lk that with the cache of layer l cut to k
    tokens after the context. A press cuts after a layer has attended, so that one prefill serves all layers and
    budgets, and only the F tokens are run for each.

    Args:
        windows: token ids, shape ``(windows, context + following)``.
        folder: stores the loss of each window; windows with a file there are not measured again.
    """
    runs = len(layers) * len(budgets) * len(windows)
    total = np.zeros((len(layers), len(budgets)))
    with frozen(model), torch.no_grad(), progress_bar("tokens kept", "run", runs, shown=progress) as bar:
        for number, ids in enumerate(windows):
            path = folder / f"window-{number:04d}.safetensors"
            if path.exists():
                bar.update(len(layers) * len(budgets))
            else:
                write_tensors(path, {"losses": _window_losses(model, ids, press, layers, budgets, following, bar)})
            total += read_arrays(path)["losses"]
    return total / len(windows)


def _window_losses(
    model: PreTrainedModel,
    ids: Tensor,
    press: Any,
    layers: Sequence[int],
    budgets: Sequence[int],
    following: int,
    bar: Any,
) -> Tensor:
    ids = ids.to(input_device(model))[None]
    context, after = ids[:, :-following], ids[:, -following:]
    cut: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def cut_to_budgets(prefill: Prefill) -> None:
        for budget in budgets:
            cut[prefill.layer, budget] = evicted(press, prefill, budget)

    prefilled: Any = DynamicCache()
    with attending(model, layers, cut_to_budgets):
        model(input_ids=context, past_key_values=prefilled, use_cache=True, logits_to_keep=1)
    full = [(layer.keys, layer.values) for layer in prefilled.layers]
    positions = torch.arange(context.shape[1], ids.shape[1], device=ids.device)[None]

    def logits(cached: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(cached):
            cache.update(keys, values, layer)  # copies them
        result: Tensor = model(input_ids=after, position_ids=positions, past_key_values=cache).logits
        return result

    losses = torch.zeros(len(layers), len(budgets), dtype=torch.float64)
    with attending(model, layers, None):
        dense = logits(full)
        for row, layer in enumerate(layers):
            for column, budget in enumerate(budgets):
                cached = [*full[:layer], cut[layer, budget], *full[layer + 1 :]]
                divergence = window_divergences(logits(cached), dense)[0] / following
                losses[row, column] = divergence.clamp(min=0)
                bar.update()
    return losses
