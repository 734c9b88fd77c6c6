"""The pipeline, readable as the algorithm: measure the model, decide, apply, check."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Unpack

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gac.allocation.crosscheck import verified
from gac.allocation.frontier import Frontier, check_asked, check_limited
from gac.allocation.frontier import frontier as whole_range
from gac.allocation.one_gpu import beside_one_gpu
from gac.allocation.rules import RULES
from gac.checkpoint.attach import attach_plan
from gac.checkpoint.load import load
from gac.checkpoint.planned import PlannedModel, planned
from gac.compression.apply import build_modules, changed_sites, describe, planned_sites
from gac.compression.ends import check_ends, rounded_ends, swap_in_ends
from gac.compression.first_shot import calibration_run, check_shots
from gac.compression.refit import refit as fit_again
from gac.compression.rounding import store_all
from gac.core.arguments import Count, Most, checked
from gac.core.distributed.run import on_every_rank, this_run
from gac.core.errors import CheckpointError, GacError, ModelError
from gac.forms.curvature.registry import METHODS
from gac.forms.planned_sites import as_planned
from gac.healing.heal import heal_model
from gac.healing.work import BLOCKS, Work
from gac.measurement.curves import stream_kept
from gac.measurement.documents import Text
from gac.measurement.texts import CalibrationText
from gac.measuring import (
    Asked,
    check_alike,
    dense_model,
    in_basis,
    measure_problem,
    planned_digest,
    planned_windows,
    statistics_key,
)
from gac.models.families import family_of
from gac.models.loading import check_in_memory, is_checkpoint, load_config, load_model
from gac.models.modules import cast, swap_in
from gac.models.packaged import PACKAGED, SAVED_IN
from gac.models.plain import check_plain
from gac.models.sites import Site
from gac.models.threads import one_call_at_a_time
from gac.plan.costs import BYTES, KV_NUMBERS, PARAMS
from gac.plan.plan import Plan
from gac.plan.recipe import Options, Recipe
from gac.profiling.select import select_profile
from gac.reporting.figures.healing import figure_of_healing
from gac.reporting.page import check_figure
from gac.reporting.page import save as save_figure
from gac.runtime.finish import finish
from gac.schemes import scheme_named


@checked
@on_every_rank
@one_call_at_a_time
def allocate(
    model: PreTrainedModel | str | Path,
    budget: float | None = None,
    *,
    recipe: Recipe | str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    verify: bool = False,
    check: Text | None = None,
    progress: bool = True,
    **options: Unpack[Options],
) -> Plan:
    """Choose, for every weight at once, the form and the aligned dim that lose least within the budget.

    Args:
        model: a loaded transformers causal LM, a local directory, a hub id, or ``"smollm2"``.
        budget: kept fraction of the parameters of the targeted weights, in (0, 1]; 0.8 where nothing is said.
        recipe: all that is asked for, as one record or the path of one; instead of ``budget`` and the options.
        tokenizer: one, or where to read it; needed where ``model`` is a loaded model of which none can be found.
        verify: solve the instance a second time, with HiGHS, and raise where the two disagree.
        check: a text like what the model will serve, a name, a path or documents. It is compared with the calibration
            text first, which is logged; with a warning where it is far from that.
        progress: show progress bars.
        options: the fields of ``gac.Recipe``, which says what each does: ``method``, ``calibration`` (its
            ``measure.text``, a list of such texts, ``["wiki-sample:32x1024", "notes.txt:32x1024"]``, or documents: any
            iterable of strings; ``gac.Documents(texts, windows=16, length=512)`` says how they are packed), ``seed``,
            ``shots``, ``bos``, ``forms``, ``schemes``, ``align``, ``rotate``, ``head``, ``profile`` (or a loaded
            table), ``workloads``, ``fuse``, ``memory``, ``kv_cache``, ``latency`` (one fraction for
            every workload, or by workload), ``refit``, ``rule``, ``tensor_parallel``.

    Returns:
        The plan, proved optimal over its candidates (or with the gap that is left, or that a rule gave away, in its
        certificate).

    Raises:
        GacError: the budget cannot be met, the cross-check disagrees, or the model, profile, text or an argument is
            not usable.
    """
    asked = Asked.of(recipe, budget, options)
    problem = measure_problem(model, asked, tokenizer, check=check, progress=progress)

    def decided() -> Plan:
        decision = beside_one_gpu(problem, RULES.get(asked.recipe.rule).decide(problem))
        return verified(decision) if verify else decision.plan

    return this_run().once(decided)


@checked
@on_every_rank
@one_call_at_a_time
def frontier(
    model: PreTrainedModel | str | Path,
    *,
    points: Annotated[int, Most(10_000)] = 100,
    limit: str = PARAMS,
    recipe: Recipe | str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    progress: bool = True,
    **options: Unpack[Options],
) -> Frontier:
    """Choose for the whole range of budgets at once; each choice is proved as ``allocate`` proves its one.

    Args:
        points: how many budgets, in even steps from the smallest that can be met; those at which nothing is gained are
            left out.
        limit: ``params``, ``bytes``, ``kv_numbers`` (what the KV cache keeps of a token), or the one of the workloads
            whose latency is limited instead. Methods whose budget is of the KV cache have ``kv_numbers`` alone.
        model, recipe, tokenizer, progress, options: as for ``allocate``; the budget is what is gone through, and there
            is no other limit.

    Returns:
        The frontier; ``frontier.plan(index)`` is the plan of a point.

    Raises:
        GacError: fewer than 2 points, a limit that is no workload, a profile that lacks the limited latency, no form
            that makes the limited cache smaller, or the model, profile, text or an argument is not usable.
    """
    asked = Asked.of(recipe, None if recipe else 1.0, options)
    method, limits = METHODS.get(asked.recipe.measure.method), asked.recipe.limits
    if method.forms:  # whose budget is of the KV cache
        if limit != KV_NUMBERS:
            given = f"a frontier of method {method.name} over {limit!r}"
            raise GacError(given, "one over its budget, which is of the KV cache", f"Limit {KV_NUMBERS}.")
        limits = replace(limits, kv_cache=None)
    recipe = replace(asked.recipe, limits=limits)
    check_asked(points, limit, recipe)
    asked = replace(asked, recipe=replace(recipe, limits=replace(limits, params=1.0, latency={}), slack=0.0))
    if limit not in (PARAMS, BYTES):
        config = load_config(str(model)) if isinstance(model, (str, Path)) else load_model(model).model.config
        sites = as_planned(family_of(config).sites(config), asked.recipe.space.forms, asked.recipe.deployment.fuse)
        check_limited(sites, select_profile(asked.profile)[0], asked.recipe, limit)
    problem = measure_problem(model, asked, tokenizer, progress=progress)
    return this_run().once(lambda: whole_range(problem, points=points, limit=limit))


@checked
@on_every_rank
@one_call_at_a_time
def compress(
    model: PreTrainedModel | str | Path,
    plan: Plan | str | Path,
    *,
    calibration: CalibrationText | None = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
) -> PlannedModel:
    """Give every weight the form and dim of the plan; on the same device, ready to generate.

    The class becomes a subclass of the model's own, whose ``save_pretrained`` and ``push_to_hub`` write the plan too.

    A loaded model is changed in place and returned (nothing is changed when this raises); copy it first to keep it.
    The factors that the allocation kept are used; where they are gone the model is measured again.

    Args:
        plan: a plan, or the path of one.
        calibration: the text that the plan was made with (or all of its texts, in their order), where it was documents
            given in memory, or a file that has moved since; as many windows as then are taken of it. None reads it by
            the plan's own name for it.
        dtype: of all numbers that no scheme stores, in the model that is returned, and so in what is saved of it. The
            plan counts 16 bits for each. None keeps the model's own; a packaged one, which is computed with in
            float32, becomes bfloat16.

    Raises:
        PlanError: the plan was made for another model, or for other calibration text.
        GacError: the model or the text cannot be read.
    """
    if dtype not in (None, torch.bfloat16, torch.float32):
        raise ModelError(f"dtype={dtype}", "torch.bfloat16 or torch.float32", "Name one of them, or leave it out.")
    plan = replace(Plan.opened(plan), healed=())
    recipe = plan.recipe
    loaded = dense_model(model, tokenizer)
    if dtype is None and loaded.name in PACKAGED:
        dtype = SAVED_IN
    sites = planned_sites(plan, family_of(loaded.model.config).sites(loaded.model.config))
    changed = changed_sites(plan, sites)
    check_in_memory(loaded.model)
    check_plain(loaded.model, [weight.name for site in sites for weight in site.weights])
    digest = planned_digest(plan, loaded, sites)
    windows = planned_windows(plan, loaded, calibration)
    ranks = this_run()
    check_alike(ranks, loaded, digest, windows, plan)
    method = METHODS.get(recipe.measure.method)
    check_shots(recipe.measure.shots, method, recipe.rule, sites, loaded.model.config.model_type)
    scheme = scheme_named(recipe.space.head)
    layers = _layers_to_fit(plan, changed, sites, scheme.lossy)
    if scheme.lossy:
        check_ends(loaded.model)
    whole = [site for site in sites if site.layer in layers]
    with in_basis(recipe, loaded, model, keep=True):
        key = statistics_key(digest, recipe)
        run = calibration_run(loaded.model, key, windows, method, recipe.measure.shots, progress=progress, ranks=ranks)
        factors = partial(stream_kept, run, whole, recipe.space.forms)
        ends = rounded_ends(loaded.model, scheme)
        modules = build_modules(run, plan.weights, changed, factors())
        if recipe.refit not in (None, "none"):
            modules = fit_again(run, modules, plan.weights, recipe.refit, sites, dict(factors()), ends)
        else:
            modules = store_all(run, modules, plan.weights, whole, factors(rounding=True))
    swap_in(loaded.model, modules)
    swap_in_ends(loaded.model, ends)
    if dtype is not None:
        cast(loaded.model, dtype)
    finish(loaded.model, describe(loaded.model.config, sites, plan.weights))
    return attach_plan(loaded.model, plan)


@checked
@on_every_rank
@one_call_at_a_time
def heal(
    model: PreTrainedModel | str | Path,
    *,
    against: PreTrainedModel | str | Path,
    text: CalibrationText | None = None,
    minutes: float | None = None,
    tokens: Count | None = None,
    learning_rate: float | None = None,
    blocks: float = BLOCKS,
    dense: bool = False,
    labels: float = 0.0,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    report: str | Path | None = None,
    progress: bool = True,
) -> PlannedModel:
    """Train a compressed model for some minutes towards the dense one: distillation in the forms and schemes it has.

    First every decoder layer learns the dense layer's output from the compressed model's own inputs, then the whole
    model the dense model's next-token distributions. Trained are the weights that the plan changes, and the norms;
    stored numbers and their scales through rounding, so that they stay in their scheme. Forms, dims and bytes stay as
    they are. A part of the text is held out: the state with the least divergence on it is kept.

    A loaded model is changed in place and returned. Its plan says what it was healed on, for how long, and the
    divergence before and after. What was interrupted goes on when the same is asked for again.

    Args:
        model: from ``compress`` or ``load``, or the directory of one.
        against: the dense model that the plan was made for.
        text: as ``calibration`` of ``allocate`` (without a size all of its calibration part), or ``"self"``: text that
            the dense model writes, kept on disk (``"self:512x1024"``: so many windows). A list of these is trained on
            together, ``["wiki-sample", "self"]``. None takes the plan's text.
        minutes: of wall-clock time, loading and text included; 5 where neither is given.
        tokens: to be read in training instead: then the same is done every time, bit for bit on one device.
        learning_rate: of full steps, relative to the size of each weight; smaller steps take less. None has one that
            suits the size of the model.
        blocks: the part of the work that goes to layers by themselves, from 0 to 1.
        dense: train the weights, too, that the plan leaves dense.
        labels: the part of the loss that is the text's own next tokens, from 0 up to below 1, in the last 15 % of the
            work, and not of text that the dense model writes. So the model also learns what the text is like, as it
            would by any training on it, and is less like the dense one.
        seed: of the order of the text, and of what the dense model writes.
        report: a figure of the loss curves to write (.png, .pdf or .svg).

    Raises:
        HealingError: divergence on the text held out did not fall, and the model is as it was; or a loss was not
            finite, and the model is as it was best, which its plan then says.
        PlanError: the dense model is not the one that the plan was made for.
        GacError: the model carries no plan, the text is too short, or an argument is not usable.
    """
    begun, ranks = time.monotonic(), this_run()
    if report is not None:
        check_figure(Path(report))
    if isinstance(model, (str, Path)) and not is_checkpoint(model):
        given = f"{model}, which is no compressed checkpoint"
        raise CheckpointError(given, "a directory that gac.save wrote", "Compress the model first.")
    small: PreTrainedModel = load(model) if isinstance(model, (str, Path)) else model
    plan = planned(small)
    check_in_memory(small, ", with heal", "where they are trained", "")
    work = Work.of(minutes, tokens, learning_rate, blocks, dense, labels, seed, plan.measured.params)
    loaded = dense_model(against, tokenizer)
    healed, ended = heal_model(small, plan, loaded, against, text, work, ranks, begun, progress)
    if report is not None and ranks.leads:
        loss = "loss" if labels else "KL(dense || healed)"
        save_figure(figure_of_healing(ended.curve, ended.start, f"{plan.measured.model}, healed", loss), report)
    if ended.failure is not None:
        raise ended.failure
    return healed


def _layers_to_fit(plan: Plan, changed: Sequence[Site], sites: Sequence[Site], ends: bool) -> set[int]:
    """The layers whose factors are needed: those that change, and where they are refitted all above the first.

    Args:
        ends: whether embedding and head are rounded, for which every layer makes up.
    """
    layers = {site.layer for site in changed}
    if plan.recipe.refit in (None, "none") or not (layers or ends):
        return layers
    if ends:
        return {site.layer for site in sites}
    return {site.layer for site in sites if site.layer >= min(layers)}
