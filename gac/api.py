"""The pipeline, readable as the algorithm: resolve, measure the model, decide, apply, check."""

import time
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from gac.allocation.crosscheck import verified
from gac.allocation.decide import attach_single_gpu_comparison
from gac.allocation.frontier import Frontier, check_frontier_recipe, check_limited
from gac.allocation.frontier import frontier as solve_frontier
from gac.allocation.problem import Problem
from gac.allocation.resolve import check_shots, resolve, without_needless_runs
from gac.allocation.rules import RULES, Rule
from gac.checkpoint.load import load
from gac.checkpoint.planned import PlannedModel, attach_plan, planned
from gac.compression.apply import changed_sites, describe, planned_sites
from gac.compression.by_text import least_worst, with_predictions
from gac.compression.first_shot import first_shot
from gac.compression.refit import fitted_modules
from gac.core.arguments import Count, CountOrZero, Most
from gac.core.distributed.run import this_run
from gac.core.errors import CheckpointError, GacError, ModelError
from gac.forms import Form
from gac.forms.curvature.methods import Method
from gac.forms.curvature.registry import METHODS
from gac.forms.planned_sites import Fusing, targeted_sites
from gac.healing import compressing
from gac.healing.heal import heal_model
from gac.healing.records import BLOCKS, TrainingBudget, default_rate
from gac.measurement.calibration import CalibrationRun
from gac.measurement.documents import Text
from gac.measurement.embeddings import check_embeddings, quantised_embeddings, replace_embeddings
from gac.measurement.session import (
    Measurement,
    calibration_runs,
    check_same_everywhere,
    load_dense_model,
    measuring,
    planned_digest,
)
from gac.measurement.text import TextSpec
from gac.measurement.text import check_text as check_named_text
from gac.measurement.texts import CalibrationText, Texts, planned_windows
from gac.measurement.untargeted import untargeted
from gac.models.loading import is_checkpoint, load_config
from gac.models.modules import cast, swap_in
from gac.models.packaged import PACKAGED, SAVED_IN
from gac.models.plain import check_in_memory
from gac.models.threads import entry_point
from gac.plan.costs import KV_NUMBERS, PARAMS
from gac.plan.plan import Plan
from gac.plan.recipe import DEFAULT_TEXT, Recipe, Refit, ResolvedRecipe, Shots
from gac.profiling.select import select_profile
from gac.profiling.table import Profile
from gac.reporting.figures.losses import figure_of_healing
from gac.reporting.page import check_figure
from gac.reporting.page import save as save_figure
from gac.runtime.finish import finish
from gac.schemes import Scheme, scheme_named


class Options(TypedDict, total=False):
    """The fields of a recipe as keywords; a form, scheme, method or rule may be an object, and one needs no list."""

    method: str | Method
    calibration: CalibrationText
    seed: int
    shots: Shots
    bos: bool | None
    balance: Literal["mean", "worst"] | None
    forms: str | Form | Iterable[str | Form]
    schemes: str | Scheme | Iterable[str | Scheme]
    align: bool | int | str
    rotate: bool | None
    head: str
    same_count: bool
    profile: Profile | str | Path | None
    workloads: str | Iterable[str]
    fuse: Fusing
    engine: str | None
    tensor_parallel: int
    memory: float | str | None
    kv_cache: float | None
    latency: float | Mapping[str, float] | Literal["any"] | None
    slack: float | None
    refit: Refit | None
    rule: str | Rule


@dataclass(frozen=True, eq=False)
class Request:
    """A recipe, and the latency table and texts that it names or that the caller passed as objects."""

    recipe: Recipe
    profile: Profile | str | Path | None
    texts: Texts

    @classmethod
    def parse(
        cls, recipe: Recipe | str | Path | None, budget: float | str | None, options: Mapping[str, Any]
    ) -> "Request":
        """Take a recipe or keywords; a GacError for both, or for an invalid option."""
        if recipe is not None:
            if keywords := [*(["budget"] if budget is not None else []), *options]:
                conflict = f"a recipe together with {', '.join(keywords)}"
                remedy = "Change the recipe with dataclasses.replace."
                raise GacError(conflict, "a recipe alone, or keywords alone", remedy)
            opened = Recipe.opened(recipe)
            names = (text,) if isinstance(text := opened.measure.text, str) else text
            request = cls(opened, opened.deployment.profile, Texts(tuple(map(TextSpec.parse, names))))
        else:
            text = options.get("calibration", DEFAULT_TEXT)
            texts, named = Texts.of(text), dict(options)
            if "rule" in options:
                named["rule"] = RULES.name(options["rule"])
            if not isinstance(text, str):
                named["calibration"] = texts.written
            request = cls(Recipe.of(budget, **named), options.get("profile"), texts)
        for part in request.texts.parts:
            if isinstance(part, TextSpec):
                check_named_text(part.name, sampled=True)
        return request


@entry_point(every_rank=True)
def allocate(
    model: PreTrainedModel | str | Path,
    budget: float | str | None = None,
    *,
    recipe: Recipe | str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | str | Path | None = None,
    solve_again: bool = False,
    check_text: Text | None = None,
    progress: bool = True,
    **options: Unpack[Options],
) -> Plan:
    """Choose, for every weight at once, the form and the aligned dim that lose least within the budget.

    Args:
        model: a loaded transformers causal LM, a local directory, a hub id, or ``"smollm2"``.
        budget: kept fraction of the parameters of the targeted weights, in (0, 1]; 0.8 by default. Or parameters of
            the whole model, embeddings and head included: ``"6B"``.
        recipe: a recipe, or the path of one, instead of ``budget`` and the options.
        tokenizer: a tokenizer, or where to read it; needed if none can be found for a loaded model. A processor, where
            a calibration text has images.
        solve_again: solve the instance a second time, with HiGHS, and raise if that finds a better choice.
        check_text: a text like what the model will serve, a name, a path or documents. Its difference from the
            calibration text is logged first, with a warning if it is large. The plan predicts the loss on it too.
        progress: show progress bars.
        options: the fields of ``gac.Recipe``, which documents them. ``calibration`` is its ``measure.text``, a list of
            such texts (``["wiki-sample:32x1024", "notes.txt:32x1024"]``), or documents: any iterable of strings, packed
            as ``gac.Documents(texts, windows=16, length=512)`` says. ``profile`` may be a loaded table, and ``latency``
            one fraction for every workload, or by workload.

    Returns:
        The plan, proved optimal over its candidates, or with the gap that is left (or that a rule gave away) in its
        certificate.

    Raises:
        GacError: the budget cannot be met, the cross-check disagrees, or an argument, model, profile or text is
            unusable.
    """
    request = Request.parse(recipe, budget, options)
    if isinstance(check_text, str):
        check_named_text(check_text)
    profile, profile_used = select_profile(request.profile, request.recipe.deployment.engine)
    others = untargeted(model, request.recipe.space) if request.recipe.limits.has_sizes else {}
    resolved = resolve(request.recipe, load_config(model), profile, profile_used, others)
    resolved = without_needless_runs(resolved, profile)
    rule = RULES.get(resolved.recipe.rule)
    opened = measuring(
        model,
        resolved,
        request.texts,
        tokenizer,
        first_shot=first_shot,
        needs=rule.needs,
        compare_with=check_text,
        progress=progress,
    )

    def decide(problem: Problem) -> Plan:
        decision = rule.decide(problem)
        if resolved.recipe.deployment.tensor_parallel > 1:
            decision = attach_single_gpu_comparison(problem, decision)
        return verified(decision) if solve_again else decision.plan

    with opened as measured_with:

        def choose(weights: Sequence[float]) -> tuple[Plan, CalibrationRun]:
            measured = measured_with(weights)
            problem = _problem(resolved, measured, profile)
            plan = this_run().once(lambda: decide(problem))
            return with_predictions(measured.run, plan, measured.check), measured.run

        return least_worst(choose) if resolved.recipe.measure.balance == "worst" else choose(())[0]


def _problem(resolved: ResolvedRecipe, measured: Measurement, profile: Profile) -> Problem:
    return Problem(
        resolved.sites, measured.curves, profile, measured.recipe, measured.evidence, measured.by_weight, resolved.steps
    )


@entry_point(every_rank=True)
def frontier(
    model: PreTrainedModel | str | Path,
    *,
    points: Annotated[int, Most(10_000)] = 100,
    limit: str = PARAMS,
    recipe: Recipe | str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | str | Path | None = None,
    progress: bool = True,
    **options: Unpack[Options],
) -> Frontier:
    """Choose for the whole range of budgets at once; each choice is proved as ``allocate`` proves its one.

    Args:
        points: number of budgets, in even steps from the smallest that can be met, without those that gain nothing.
        limit: ``params``, ``bytes``, ``kv_numbers`` (of a token in the KV cache), or a workload whose latency is
            limited instead. Methods whose budget is of the KV cache take ``kv_numbers`` alone.
        model, recipe, tokenizer, progress, options: as for ``allocate``, without other limits.

    Returns:
        The frontier; ``frontier.plan(index)`` is the plan of a point.

    Raises:
        GacError: fewer than 2 points, a limit that is no workload, a profile that lacks the limited latency, no form
            that makes the limited cache smaller, or an unusable argument, model, profile or text.
    """
    request = Request.parse(recipe, None if recipe else 1.0, options)
    method, limits = METHODS.get(request.recipe.measure.method), request.recipe.limits
    if method.forms and limit != KV_NUMBERS:
        conflict = f"a frontier of method {method.name} over {limit!r}"
        raise GacError(conflict, "one over its budget, which is of the KV cache", f"Limit {KV_NUMBERS}.")
    check_frontier_recipe(points, limit, request.recipe)
    unlimited = replace(request.recipe, limits=replace(limits, params=1.0, latency={}), slack=0.0)
    profile, profile_used = select_profile(request.profile, request.recipe.deployment.engine)
    resolved = resolve(unlimited, load_config(model), profile, profile_used)
    # A method with forms of its own has read the budget as that of the cache, which is the limit gone through here.
    resolved = replace(resolved, recipe=replace(resolved.recipe, limits=replace(resolved.recipe.limits, kv_cache=None)))
    check_limited(resolved.sites, profile, resolved.recipe, limit)
    opened = measuring(model, resolved, request.texts, tokenizer, first_shot=first_shot, progress=progress)
    with opened as measured_with:
        problem = _problem(resolved, measured_with(()), profile)
    return this_run().once(lambda: solve_frontier(problem, points=points, limit=limit))


@entry_point(every_rank=True)
def compress(
    model: PreTrainedModel | str | Path,
    plan: Plan | str | Path,
    *,
    calibration: CalibrationText | None = None,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | str | Path | None = None,
    dtype: torch.dtype | None = None,
    heal: CountOrZero | None = None,
    progress: bool = True,
) -> PlannedModel:
    """Give every weight the form and dim of the plan; on the same device, ready to generate.

    The class becomes a subclass of the model's own, whose ``save_pretrained`` and ``push_to_hub`` write the plan too.
    A loaded model is changed in place and returned (nothing is changed when this raises); copy it first to keep it.
    The factors that the allocation stored are used; if they are gone, the model is measured again. Weights are fitted
    in closed form, and then the model is healed for some seconds, if there is a GPU that has room for it.

    Args:
        plan: a plan, or the path of one.
        calibration: the text that the plan was made with (or all of its texts, in their order), if it was documents
            in memory, or a file that has moved since; as many windows are taken of it. None reads it by its name in
            the plan.
        dtype: of all numbers that no scheme stores; the plan counts 16 bits for each. None keeps the model's own; a
            packaged one, which computes in float32, becomes bfloat16.
        heal: tokens to train on at the end, as ``heal`` does with ``blocks=0``: towards the dense model, on all of the
            text that the plan was calibrated on. The plan records it. None: 524,288 on a GPU that holds both models and
            the state of training, and none elsewhere, which is logged. 0: none. Plans predict the loss before it.

    Raises:
        PlanError: the plan was made for another model, or for other calibration text.
        GacError: the model or the text cannot be read.
    """
    if dtype not in (None, torch.bfloat16, torch.float32):
        raise ModelError(f"dtype={dtype}", "torch.bfloat16 or torch.float32", "Name one of them, or leave it out.")
    plan = replace(Plan.opened(plan), healed=())
    recipe, ranks = plan.recipe, this_run()
    config = load_config(model)
    targeted = targeted_sites(config, recipe.space.forms)
    sites = planned_sites(plan, targeted)
    changed = changed_sites(plan, sites)
    loaded = load_dense_model(model, tokenizer, targeted)
    if dtype is None and loaded.name in PACKAGED:
        dtype = SAVED_IN
    check_in_memory(loaded.model)
    digest = planned_digest(plan, loaded, sites)
    windows = planned_windows(plan, loaded, calibration, progress)
    if ranks.count > 1:
        check_same_everywhere(ranks, loaded, digest, windows, plan)
    if recipe.measure.shots == 2:
        check_shots(recipe, METHODS.get(recipe.measure.method), sites, config.model_type)
    scheme = scheme_named(recipe.space.head)
    if scheme.lossy:
        check_embeddings(loaded.model)
    healing = compressing.prepared(heal, plan, loaded, windows, ranks)
    owned = isinstance(model, (str, Path))
    opened = calibration_runs(
        loaded, recipe, windows, digest, owned=owned, first_shot=first_shot, keep_rotated=True, progress=progress
    )
    with opened as (run_of, _):
        run = run_of([part.weight for part in plan.measured.calibration.parts])
        embeddings = quantised_embeddings(loaded.model, scheme)
        modules = fitted_modules(run, plan, sites, changed, embeddings)
    dense = None if healing is None else deepcopy(loaded.model)
    swap_in(loaded.model, modules)
    replace_embeddings(loaded.model, embeddings)
    if dtype is not None:
        cast(loaded.model, dtype)
    finish(loaded.model, describe(loaded.model.config, sites, plan.weights))
    small = attach_plan(loaded.model, plan)
    return small if healing is None else healing.run(small, dense, plan, digest, ranks, progress)


@entry_point(every_rank=True)
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
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | str | Path | None = None,
    report: str | Path | None = None,
    progress: bool = True,
) -> PlannedModel:
    """Train a compressed model for some minutes towards the dense one: distillation in the forms and schemes it has.

    First every decoder layer learns the dense layer's output from the compressed model's own inputs, then the whole
    model the dense model's next-token distributions. The weights that the plan changes and the norms are trained;
    stored numbers and their scales through rounding, so that they stay in their scheme. Forms, dims and bytes stay.
    The state with the least divergence on held-out text is kept.

    A loaded model is changed in place and returned. Its plan records the text, the work, and the divergence before and
    after. An interrupted run resumes when called with the same arguments.

    Args:
        model: from ``compress`` or ``load``, or the directory of one.
        against: the dense model that the plan was made for.
        text: as ``calibration`` of ``allocate`` (without a size all of its calibration part), or ``"self"``: text that
            the dense model generates, stored on disk (``"self:512x1024"``: so many windows). A list of these is trained
            on together, ``["wiki-sample", "self"]``. None takes the plan's text.
        minutes: wall-clock time, loading and text included; 5 if neither is given.
        tokens: tokens to train on instead: the same run every time, bit for bit on one device.
        learning_rate: of full steps, relative to the size of each weight; None: by the size of the model.
        blocks: the share of the work for single layers, from 0 to 1.
        dense: also train the weights that the plan leaves dense.
        labels: the weight of the text's own next tokens in the loss, from 0 to below 1, in the last 15 % of the work,
            and not on text that the dense model generates. So the model also learns the text, as by any training on it,
            and drifts from the dense model.
        seed: of the order of the text, and of what the dense model generates.
        report: a figure of the loss curves to write (.png, .pdf or .svg).

    Raises:
        HealingError: divergence on held-out text did not fall, and the model is unchanged; or a loss was not finite,
            and the model is in its best state, which its plan then says.
        PlanError: the dense model is not the one that the plan was made for.
        GacError: the model carries no plan, the text is too short, or an argument is unusable.
    """
    begun, ranks = time.monotonic(), this_run()
    if report is not None:
        check_figure(Path(report))
    if isinstance(model, (str, Path)) and not is_checkpoint(model):
        conflict = f"{model}, which is no compressed checkpoint"
        raise CheckpointError(conflict, "a directory that gac.save wrote", "Compress the model first.")
    small: PreTrainedModel = load(model) if isinstance(model, (str, Path)) else model
    plan = planned(small)
    check_in_memory(small, ", with heal", "where they are trained", "")
    rate = default_rate(plan.measured.params) if learning_rate is None else learning_rate
    training = TrainingBudget(minutes, tokens, rate, blocks, dense, labels, seed)
    loaded = load_dense_model(against, tokenizer)
    healed, result = heal_model(small, plan, loaded, against, text, training, ranks, begun, progress)
    if report is not None and ranks.leads:
        loss = "loss" if labels else "KL(dense || healed)"
        curve, start = result.progress.curve, result.progress.start_loss
        save_figure(figure_of_healing(curve, start, f"{plan.measured.model}, healed", loss), report)
    if result.failure is not None:
        raise result.failure
    return healed
