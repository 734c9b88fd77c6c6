"""The pipeline, readable as the algorithm: measure the model, decide, apply, check."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gac.allocation.assemble import Provenance
from gac.allocation.crosscheck import check_installed, verified
from gac.allocation.feasibility import check_cache_reachable, check_one_row, check_reachable
from gac.allocation.frontier import PARAMS, Frontier, check_asked, check_profiled
from gac.allocation.frontier import frontier as whole_range
from gac.allocation.limits import budget_limit, parse_align
from gac.allocation.problem import Problem
from gac.allocation.reproduce import rule_of
from gac.allocation.rules import RULES, Rule
from gac.checkpoint.attach import attach_plan, check_class, check_dense
from gac.checkpoint.export import export_plain
from gac.checkpoint.load import load_checkpoint
from gac.checkpoint.save import save_checkpoint
from gac.compression.apply import build_modules, changed_sites, swap_in
from gac.compression.first_shot import check_held, check_shots
from gac.compression.modules import planned_sites, share_gemms
from gac.compression.refit import leaves, refit_named
from gac.compression.refit import refit as fit_again
from gac.compression.statistics import statistics
from gac.errors import GacError, ModelError, PlanError
from gac.evaluation.perplexity import perplexity as measure_perplexity
from gac.evaluation.results import Perplexity
from gac.forms import DEFAULT_FORMS, form_named
from gac.forms.metric import FACTOR
from gac.forms.planned_sites import Fusing, as_planned, check_forms_fit, check_run
from gac.forms.tensors import Kept
from gac.models.families import family_of
from gac.models.linears import check_rows_together
from gac.models.loading import (
    Loaded,
    check_finite,
    check_in_memory,
    load_config,
    load_model,
    load_tokenizer,
    model_digest,
)
from gac.models.sites import Site
from gac.plan import Calibration, Plan
from gac.profiling.select import select_profile
from gac.profiling.table import Profile
from gac.runtime.decode import use_decode_kernel
from gac.sensitivity.curves import Source, measure_curves, stream_fits
from gac.sensitivity.documents import Documents, Text
from gac.sensitivity.methods import Method
from gac.sensitivity.registry import METHODS
from gac.sensitivity.store import StatisticsStore
from gac.sensitivity.text import TextSpec, Windows, calibration_text, calibration_windows, check_vocabulary
from gac.workloads import Workload

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("gac")


def allocate(
    model: "PreTrainedModel | str | Path",
    budget: float = 0.8,
    *,
    profile: Profile | str | Path | None = None,
    method: str = "kfac",
    forms: Sequence[str] = DEFAULT_FORMS,
    latency: float | Mapping[str, float] | None = None,
    kv_cache: float | None = None,
    workloads: Sequence[str] = ("prefill:1x1024", "decode:1@1024"),
    calibration: Text = "wiki-sample",
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    align: bool | int | str = True,
    fuse: Fusing = False,
    one_row: bool = False,
    rule: str = "loss",
    refit: str | None = None,
    shots: int = 1,
    verify: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> Plan:
    """Choose, for every weight at once, the form and the aligned dim that lose least within the budget.

    Args:
        model: a loaded transformers causal LM, a local directory, a hub id, or ``"smollm2"``.
        budget: kept fraction of the parameters of the targeted weights, in (0, 1]; never exceeded
            by the rules ``loss`` and ``importance`` (``plan.budget.over`` says by how much another one did).
        profile: a latency table, its path, or the name of a shipped one; None takes the local GPU's, and the
            shipped H100's where there is no GPU (the plan says so).
        method: the metric that errors are measured in: ``kfac``, ``svd-llm``, ``asvd`` (``asvd:ALPHA``) or ``svd``; or
            ``palu`` (``palu:N``), which gives k_proj and v_proj its form ``grouped``, in groups of 4 (N) heads, leaves
            everything else dense, and takes the budget for the kept fraction of the KV cache; ``palu-fold`` has groups
            of one head, and folds V's second factor into o_proj.
        forms: forms that compete with staying dense: ``low_rank``, ``narrow`` (fewer neurons of an MLP), ``head_dim``
            (shorter value vectors, in v_proj, o_proj and the KV cache). Of two that differ in nothing that is limited,
            the first stays.
        latency: allowed fraction of the dense weights' latency, for every workload or by workload.
        kv_cache: allowed fraction of the dense model's KV cache; needs the form ``head_dim``.
        workloads: what latency is predicted for: ``prefill:BxS``, ``decode:B@C``.
        calibration: text to take statistics from: ``wiki-sample``, ``wikitext2``, ``c4`` or a path, optionally with
            windows and tokens, as in ``wiki-sample:64x1024``; or documents, any iterable of strings
            (``gac.Documents(texts, windows=16, length=512)`` says how they are packed).
        tokenizer: needed where ``model`` is a loaded model of which no tokenizer can be found.
        align: keep to dims that the profile shows to be sound; a number keeps to its multiples among them, False
            allows every integer. ``profile,group=128``: whole groups of 128, for weights that are quantised later.
        fuse: run the first GEMMs of weights that read the same input (q/k/v, gate/up) as one, and choose their dims
            together for it; the profile has to hold those shapes (``gac profile --model ... --fuse``) where latency is
            limited or to be predicted. ``"auto"``: where the plan is better so, chosen with the dims; where only
            parameters are limited that is where it is faster, and where the profile lacks a shape it is not done. The
            dense model that latencies are fractions of then runs unfused.
        one_row: run every linear weight but the head in a Triton kernel where it has one row, which is decoding one
            sequence, and choose dims for it; in CUDA graphs and compiled code, for launching takes longer than the
            kernel. Where such a workload is asked for, the profile has to hold its shapes (``gac profile --model ...
            --one-row``). The dense model that latencies are fractions of runs as it is.
        rule: how the choice is made. ``loss`` is exact over the loss curves. Others to compare it with: ``importance``
            (scores times parameters in a window of the unaligned ranks, solved exactly), and the peers' rules
            ``uniform`` (SVD-LLM), ``fisher`` (PaLU), ``zero-sum`` (ZS-SVD; one more backward pass over the calibration
            text) and ``sensitivity`` (ASVD; nine runs of the model for every weight), which can also be rounded:
            ``uniform:down8``, ``fisher:nearest32``, ``zero-sum:pad64``.
        refit: how weights are fitted again, layer by layer, to the model as it is compressed so far: ``residual``
            (dense weights too, to the dense outputs and to what the residual stream has lost), ``update`` (second
            factors alone, SVD-LLM's closed form) or ``none``. None: ``residual`` for the method ``kfac`` and the rule
            ``loss`` where layers add what o_proj and down_proj write to the residual stream (not Gemma 2 and 3, OLMo 2
            and 3, GLM 4, EXAONE 4, Granite). It belongs to the plan, for it changes what is predicted.
        shots: 2 takes the gradients a second time, from the model compressed to 0.8 by its plan of one shot and fitted
            again (inputs stay the dense model's), and plans with them: SmolLM2's perplexity is 0.5 % lower for it at
            0.8 and 1.8 % at 0.6. Calibration takes twice as long (three times where statistics are too large to be
            kept, see ``gac.sensitivity.calibration``), and the first shot's model is a second copy of the targeted
            weights on the same devices. For the method ``kfac`` and the rule ``loss``, where weights can be fitted
            again by ``residual``; its statistics are kept by themselves, and serve every budget.
        verify: solve the instance a second time, with OR-Tools CP-SAT, and raise where the two disagree.
        seed: which windows of the calibration text are used; 0 takes the first.
        progress: show progress bars.

    Returns:
        The plan, proved optimal over its candidates (or with the gap that is left, or that a rule gave away, in its
        certificate).

    Raises:
        GacError: the budget cannot be met, the cross-check disagrees, or the model, profile, text or an argument is
            not usable.
    """
    how = RULES.get(rule)
    forms, budget, kv_cache = _planned_with(METHODS.get(method), forms, budget, kv_cache)
    how.check(forms, latency, kv_cache)
    if verify:
        check_installed()
    problem, made_from = _measured(
        model,
        tokenizer,
        rule=how,
        refit=refit,
        shots=shots,
        budget=budget,
        profile=profile,
        method=method,
        forms=forms,
        workloads=workloads,
        calibration=calibration,
        align=align,
        fuse=fuse,
        one_row=one_row,
        seed=seed,
        progress=progress,
        kv_cache=kv_cache,
    )
    decision = how.decide(problem, budget, _fractions(latency, problem.workloads), made_from, kv_cache)
    return verified(decision) if verify else decision.plan


def frontier(
    model: "PreTrainedModel | str | Path",
    *,
    points: int = 100,
    limit: str = PARAMS,
    profile: Profile | str | Path | None = None,
    method: str = "kfac",
    forms: Sequence[str] = DEFAULT_FORMS,
    workloads: Sequence[str] = ("prefill:1x1024", "decode:1@1024"),
    calibration: Text = "wiki-sample",
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    align: bool | int | str = True,
    fuse: Fusing = False,
    one_row: bool = False,
    refit: str | None = None,
    shots: int = 1,
    seed: int = 0,
    progress: bool = True,
) -> Frontier:
    """Choose for the whole range of budgets at once; each choice is proved as ``allocate`` proves its one.

    Args:
        points: how many budgets, in even steps from the smallest that can be met; those at which nothing is gained are
            left out.
        limit: ``params``, or the one of the workloads whose latency is limited instead.
        model, profile, method, forms, workloads, calibration, tokenizer, align, fuse, one_row, refit, shots,
            seed, progress: as for ``allocate``.

    Returns:
        The frontier; ``frontier.plan(index)`` is the plan of a point.

    Raises:
        GacError: fewer than 2 points, a limit that is no workload, a profile that lacks the limited latency, or the
            model, profile, text or an argument is not usable.
    """
    if own := METHODS.get(method).forms:
        raise GacError(
            f"a frontier of method {method}, whose budget is of the KV cache",
            "a method for any form",
            f"Plan {', '.join(own)} with gac.allocate.",
        )
    _planned_with(METHODS.get(method), forms, 1.0, None)
    parsed = tuple(Workload.parse(workload) for workload in workloads)
    check_asked(points, limit, parsed)
    check_run(fuse, one_row)
    if limit != PARAMS:
        config = load_config(str(model)) if isinstance(model, (str, Path)) else model.config
        sites = family_of(config).sites(config)
        check_profiled(as_planned(sites, forms, fuse), select_profile(profile)[0], parsed, limit)
    problem, made_from = _measured(
        model,
        tokenizer,
        budget=1.0,
        profile=profile,
        method=method,
        forms=forms,
        workloads=workloads,
        calibration=calibration,
        align=align,
        fuse=fuse,
        one_row=one_row,
        refit=refit,
        shots=shots,
        seed=seed,
        progress=progress,
    )
    return whole_range(problem, made_from, points=points, limit=limit)


def compress(
    model: "PreTrainedModel | str | Path",
    plan: Plan,
    *,
    calibration: Text | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    progress: bool = True,
) -> "PreTrainedModel":
    """Give every weight the form and dim of the plan; on the same device, ready to generate.

    The class becomes a subclass of the model's own, whose ``save_pretrained`` and ``push_to_hub`` write the plan too.

    A loaded model is changed in place and returned (nothing is changed when this raises); copy it first to keep it.
    The factors that the allocation kept are used; where they are gone the model is measured again.

    Args:
        calibration: the text that the plan was made with, where it was documents given in memory, or a file that has
            moved since; as many windows as then are taken of it. None reads it by the plan's own name for it.

    Raises:
        PlanError: the plan was made for another model, or for other calibration text.
        GacError: the model or the text cannot be read.
    """
    loaded = _dense(model, tokenizer)
    sites = planned_sites(plan, family_of(loaded.model.config).sites(loaded.model.config))
    changed = changed_sites(plan, sites)
    check_class(loaded.model)
    check_in_memory(loaded.model)
    check_finite(loaded.model)
    digest = _planned_digest(plan, loaded, sites)
    windows = _planned_windows(plan, loaded, calibration)
    method = METHODS.get(plan.method)
    shots = check_shots(plan.shots, method, rule_of(plan) or "loss", sites, loaded.model.config.model_type)
    store, source = statistics(loaded.model, digest, windows, method, shots, progress=progress)
    layers = _layers_to_fit(plan, changed, sites)
    whole = [site for site in sites if site.layer in layers]
    factors = partial(_factors, loaded.model, whole, windows.ids, method, store, source, plan.forms, progress)
    modules = build_modules(loaded.model, plan.weights, changed, factors(), method)
    if plan.refit != "none":
        kept = dict(factors())
        modules = fit_again(
            loaded.model, modules, plan.weights, plan.refit, sites, kept, windows.ids, method, progress=progress
        )
    swap_in(loaded.model, modules)
    share_gemms(loaded.model, sites)
    if plan.one_row:
        use_decode_kernel(loaded.model)
    attach_plan(loaded.model, plan)
    return loaded.model


def save(
    model: "PreTrainedModel",
    directory: str | Path,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a compressed model as a directory: safetensors, config, plan and tokenizer; whole or absent.

    Args:
        model: from ``compress`` or ``load``.
        tokenizer: None looks for that of the model the plan was made for, and says so where there is none.
        overwrite: replace a compressed checkpoint that is there already.
        max_shard_size: bytes, or as in ``5GB``, after which another file of weights begins.

    Raises:
        CheckpointError: the model was not compressed by GAC, or the directory cannot be written or is in use.
    """
    plan = getattr(model, "gac_plan", None)
    if tokenizer is None and isinstance(plan, Plan):
        tokenizer = _tokenizer_of(plan.model)
    save_checkpoint(model, directory, tokenizer, overwrite=overwrite, max_shard_size=max_shard_size)


def export(
    model: "PreTrainedModel | str | Path",
    directory: str | Path,
    *,
    merge: bool = False,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> None:
    """Write a compressed model as one of its stock architecture, which needs no GAC and no code.

    Args:
        model: from ``compress`` or ``load``, or the directory of one.
        merge: give every weight its dense dims again: the same function up to rounding, neither smaller nor faster
            than the dense model. False keeps the dims, which is possible where MLPs alone are narrower, by as much in
            every layer.
        tokenizer: None looks for the model's own.

    Raises:
        CheckpointError: there is no such model, a stock config cannot say its dims, or the directory cannot be written
            or is in use.
    """
    loaded = load_checkpoint(model) if isinstance(model, (str, Path)) else model
    if merge:
        logger.warning("a merged model has the dense model's dims: it is neither smaller nor faster")
    export_plain(loaded, directory, tokenizer or _tokenizer_of(str(loaded.config.name_or_path)), merge=merge)


def load(directory: str | Path) -> "PreTrainedModel":
    """Open a directory that ``save`` wrote; runs no code from it.

    Raises:
        CheckpointError: a file is missing, damaged, or contradicts the plan.
    """
    return load_checkpoint(directory)


def perplexity(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    text: Text = "wiki-sample",
    *,
    windows: int | None = None,
    length: int | None = None,
    progress: bool = True,
) -> Perplexity:
    """Perplexity over non-overlapping windows of text that no calibration uses.

    ``wikitext2`` and ``c4`` are measured as published figures are: GPTQ's and SVD-LLM's protocols.

    Args:
        text: ``wiki-sample``, ``wikitext2``, ``c4``, a path, the text itself, or documents as for ``allocate``
            (windows and length are those given here), none of which the model's plan was calibrated on.
        windows: how many windows at most; None takes all.
        length: tokens in a window; None takes 2048 for ``wikitext2`` and ``c4``, else 1024.

    Raises:
        TextError: the text is unknown or too short.
        GacError: a window's loss is not finite, or the model has fewer positions than a window has tokens.
    """
    return measure_perplexity(model, tokenizer, text, windows=windows, length=length, progress=progress)


def _tokenizer_of(name: str) -> "PreTrainedTokenizerBase | None":
    """The tokenizer of that name, where there is one."""
    try:
        found: PreTrainedTokenizerBase = load_tokenizer(name)
    except ModelError as failure:
        logger.warning("saving without a tokenizer: %s", failure)
        return None
    return found


def _measured(
    model: "PreTrainedModel | str | Path",
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    rule: Rule | None = None,
    refit: str | None,
    shots: int = 1,
    budget: float,
    profile: Profile | str | Path | None,
    method: str,
    forms: Sequence[str],
    workloads: Sequence[str],
    calibration: Text,
    align: bool | int | str,
    fuse: Fusing,
    one_row: bool,
    seed: int,
    progress: bool,
    kv_cache: float | None = None,
) -> tuple[Problem, Provenance]:
    """The loss curves of a model's sites beside a latency table; a budget out of reach is refused before that."""
    rule = rule or RULES.get("loss")
    align = parse_align(align)
    check_run(fuse, one_row)
    parsed = tuple(Workload.parse(workload) for workload in workloads)
    names = tuple(form_named(name).name for name in forms)
    how = METHODS.get(method)
    spec = calibration_text(calibration)
    table, used = select_profile(profile)
    logger.info("profile of %s: %s", used.gpu, used.note)
    loaded = _dense(model, tokenizer)
    sites = family_of(loaded.model.config).sites(loaded.model.config)
    check_forms_fit(sites, names, loaded.model.config.model_type)
    again = refit_named(refit, rule.name, how, names, sites, loaded.model.config.model_type)
    taken = check_shots(shots, how, rule.name, sites, loaded.model.config.model_type)
    check_held(loaded.model, taken)
    planned = as_planned(sites, names, fuse)
    if one_row:
        check_rows_together(loaded.model, [weight.name for site in sites for weight in site.weights])
        check_one_row(planned, table, parsed)
    limit = budget_limit(budget, sum(site.params for site in sites))
    check_reachable(planned, limit, forms=names, profile=table, workloads=parsed, align=align, one_row=one_row)
    if kv_cache is not None:
        check_cache_reachable(planned, kv_cache, names, align)
    windows = _calibration_windows(spec, loaded, seed)
    check_finite(loaded.model)
    digest = _digest(loaded, sites)
    store, source = statistics(loaded.model, digest, windows, how, taken, progress=progress)
    curves = measure_curves(loaded.model, sites, windows.ids, how, store, forms=names, source=source, progress=progress)
    measured = rule.measure(loaded.model, sites, windows.ids, how, store, progress=progress)
    made_from = Provenance(
        model=loaded.name,
        model_digest=digest,
        model_params=sum(parameter.numel() for parameter in loaded.model.parameters()),
        family=loaded.model.config.model_type,
        method=method,
        forms=names,
        align=align,
        seed=seed,
        calibration=_calibration(spec, windows, curves.dense_loss),
        profile=used,
        factor=FACTOR * leaves(again, how),
        fused=fuse,
        refit=again,
        shots=taken,
        one_row=one_row,
    )
    return Problem(
        planned, curves.curves.scaled(leaves(again, how)), names, table, parsed, align, measured, one_row
    ), made_from


def _dense(model: "PreTrainedModel | str | Path", tokenizer: "PreTrainedTokenizerBase | None") -> Loaded:
    """The model, which no one has compressed yet; of an unknown family it is refused before its weights are fetched."""
    if isinstance(model, (str, Path)):
        family_of(load_config(str(model)))
    loaded = load_model(model, tokenizer)
    check_dense(loaded.model)
    return loaded


def _digest(loaded: Loaded, sites: Sequence[Site]) -> str:
    return model_digest(loaded.model, [weight.name for site in sites for weight in site.weights])


def _planned_digest(plan: Plan, loaded: Loaded, sites: Sequence[Site]) -> str:
    digest = _digest(loaded, sites)
    if digest != plan.model_digest:
        raise PlanError(
            f"the model's weights have digest {digest[:12]}",
            f"{plan.model_digest[:12]}, those of {plan.model} that the plan was made for",
            "Use the plan with the model it was made for, or allocate again.",
        )
    return digest


def _planned_with(
    method: Method, forms: Sequence[str], budget: float, kv_cache: float | None
) -> tuple[tuple[str, ...], float, float | None]:
    """Forms, budget and KV-cache limit to plan with: a method with a form of its own takes the budget for the cache's.

    Raises:
        GacError: other forms than its own, a second limit of the cache, or such a form with another method.
    """
    forms = tuple(forms)
    if not method.forms:
        for name in forms:
            if form_named(name).counts == "cached":
                given = f"form {name} with method {method.name}"
                raise GacError(given, "method palu, which measures groups of heads", "Use method='palu'.")
        return forms, budget, kv_cache
    if forms not in (DEFAULT_FORMS, method.forms):
        given = f"method {method.name} with forms {', '.join(forms)}"
        raise GacError(given, f"its own, {', '.join(method.forms)}", "Leave the forms out.")
    if kv_cache is not None:
        given = f"method {method.name} with budget {budget:g} and a KV-cache limit of {kv_cache:g}"
        raise GacError(given, "a budget alone, which is the kept fraction of the KV cache", "Drop the KV-cache limit.")
    return method.forms, 1.0, budget


def _layers_to_fit(plan: Plan, changed: Sequence[Site], sites: Sequence[Site]) -> set[int]:
    """The layers whose factors are needed: those that change, and where they are refitted all above the first."""
    layers = {site.layer for site in changed}
    if plan.refit == "none" or not layers:
        return layers
    return {site.layer for site in sites if site.layer >= min(layers)}


def _factors(
    model: "PreTrainedModel",
    sites: Sequence[Site],
    windows: "Tensor",
    method: Method,
    store: StatisticsStore,
    source: Source | None,
    forms: Sequence[str],
    progress: bool,
) -> Iterator[tuple[int, Kept]]:
    fits = stream_fits(model, sites, windows, method, store, forms=forms, source=source, progress=progress)
    return ((layer, fit.kept) for layer, fit in fits)


def _fractions(latency: float | Mapping[str, float] | None, workloads: Sequence[Workload]) -> dict[str, float]:
    if latency is None:
        return {}
    if isinstance(latency, Mapping):
        return {str(Workload.parse(workload)): fraction for workload, fraction in latency.items()}
    return {str(workload): latency for workload in workloads}


def _calibration(spec: TextSpec | Documents, windows: Windows, loss: float) -> Calibration:
    digests = spec.digests if isinstance(spec, Documents) else ()
    return Calibration(spec.name, len(windows), windows.length, windows.digest, loss, digests)


def _calibration_windows(spec: TextSpec | Documents, loaded: Loaded, seed: int) -> Windows:
    windows = calibration_windows(spec, loaded.tokenizer, seed)
    embedding: Any = loaded.model.get_input_embeddings()
    check_vocabulary(windows, embedding.num_embeddings)
    return windows


def _planned_windows(plan: Plan, loaded: Loaded, calibration: Text | None = None) -> Windows:
    text = plan.calibration
    if calibration is None and text.documents:
        raise PlanError(
            f"a plan calibrated on {text.text}",
            f"the same documents, whose windows have digest {text.digest[:12]}",
            "Pass them: gac.compress(model, plan, calibration=documents).",
        )
    spec = TextSpec(text.text) if calibration is None else calibration_text(calibration)
    spec = replace(spec, windows=text.windows, length=text.window_tokens)
    windows = _calibration_windows(spec, loaded, plan.seed)
    if windows.digest != text.digest:
        raise PlanError(
            f"calibration text {spec.name} has digest {windows.digest[:12]} here",
            f"{text.digest[:12]}, as when the plan was made",
            "Use the same text and tokenizer, or allocate again.",
        )
    return windows
