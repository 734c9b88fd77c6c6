"""Complete a recipe: decide every default for one model and one latency table, before anything is measured."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from gac.allocation.candidate_set import CandidateSet
from gac.allocation.candidates import zip_candidates
from gac.allocation.dense import DenseModel, dense_by_scheme, shipped_table, total
from gac.allocation.dims import check_forms_divide
from gac.allocation.feasibility import check_reachable
from gac.allocation.latencies import BF16, DTYPE, Timing, has_attention_latency
from gac.allocation.rules import RULES
from gac.allocation.split_latencies import check_collectives
from gac.allocation.whole_model import in_fractions
from gac.core.errors import BudgetError, GacError, ModelError, PlanError, ProfileError
from gac.forms import DEFAULT_FORMS, FORMS, Form, form_named
from gac.forms.curvature.registry import METHODS
from gac.forms.planned_sites import Fusing, as_planned, check_forms_fit, fuse_sites, targeted_sites, without_misfits
from gac.forms.tensor_parallel import check_splits
from gac.models.attentions import sliding_layers
from gac.models.families import family_of
from gac.models.sites import Site
from gac.plan.costs import ns_of
from gac.plan.engines import (
    ENGINES,
    MIXTURE_STEPS,
    PAIR,
    STEPS,
    TRANSFORMERS,
    VLLM,
    Engine,
    Step,
    paired_rank,
    sites_in,
    steps_of,
    with_half_mlps,
)
from gac.plan.evidence import ProfileUsed
from gac.plan.recipe import Deployment, Recipe, Refit, ResolvedRecipe, Space
from gac.plan.summary import profile_command
from gac.profiling.table import Profile
from gac.runtime.contract import experts_of
from gac.schemes import DEFAULT_SCHEME, SCHEMES, scheme_named

if TYPE_CHECKING:
    from gac.forms.curvature.methods import Method

logger = logging.getLogger("gac")

SLACK = 0.003
"""Default fraction of the least loss that may be lost more for speed."""


def resolve(
    recipe: Recipe,
    config: Any,
    profile: Profile,
    profile_used: ProfileUsed,
    others: Mapping[str, int] = MappingProxyType({}),
) -> ResolvedRecipe:
    """Decide what the recipe leaves open, and refuse what cannot be planned.

    Args:
        config: the model's, or the shapes of a known model.
        profile_used: what the plan records of the profile.
        others: what is not targeted, by cost (``gac.measurement.untargeted``), where limits are sizes.

    Raises:
        GacError: options that exclude each other, or that do not fit the model; a limit that no choice can meet.
    """
    method = METHODS.get(recipe.measure.method)
    if method.forms:
        recipe = _with_method_forms(recipe, method)
    space, run, plain = recipe.space, recipe.deployment, recipe.rule == "loss" and not method.forms
    in_engine = any(profile.measured_in(step, DTYPE) for step in (STEPS[0], MIXTURE_STEPS[0]))
    steps = engine_steps(config, run, profile, space.schemes) if in_engine else {}
    if run.engine is not None:
        engine = ENGINES[run.engine]
        _check_engine(engine, space, run, config)
    else:
        as_served = plain and run.fuse is None and space.head == DEFAULT_SCHEME
        as_served = as_served and VLLM.unserved(space.forms, space.schemes) is None
        engine = VLLM if steps and as_served and not _mixtures_instead(config, space) else TRANSFORMERS
    fuse: Fusing | None = True if engine.shares else run.fuse
    if fuse is None:
        fuse = "auto" if plain else False
    recipe = replace(recipe, deployment=replace(run, engine=engine.name, fuse=fuse))
    RULES.get(recipe.rule).check(recipe)
    family = family_of(config)
    split = getattr(config, "base_model_tp_plan", (family.output,)) or ()
    undivided = not family.is_plain or not any(name.endswith(family.output) for name in split)
    if run.tensor_parallel > 1 and undivided:
        reason = "a mixture of experts" if family.experts else "which transformers does not divide"
        problem = f"tensor_parallel={run.tensor_parallel} for a {config.model_type}, {reason}"
        expected = "an architecture with a base_model_tp_plan in transformers that divides every layer"
        raise ModelError(problem, expected, "Plan for one GPU (tensor_parallel=1).")
    targeted = targeted_sites(config, space.forms)
    experts_stay = family.experts is not None and not any(
        weight.experts for site in targeted for weight in site.weights
    )
    recipe = in_fractions(recipe, targeted, others, routed=experts_stay)
    space = replace(space, forms=without_misfits(targeted, space.forms))
    recipe = replace(recipe, space=space)
    check_forms_fit(targeted, space.forms, config.model_type)
    if space.same_count and not any(weight.is_routed for site in targeted for weight in site.weights):
        problem = f"same_count with forms {_listed(space)} for a {config.model_type} model"
        raise PlanError(problem, "the form experts, of which it says that layers keep as many", "Leave it out.")
    _check_whole_attention(space.forms, config, run.tensor_parallel)
    if recipe.measure.shots == 2:
        check_shots(recipe, method, targeted, config.model_type)
    adds_to_residual = any(weight.to_residual for site in targeted for weight in site.weights)
    if (refit := recipe.refit) is None:
        refit = "residual" if recipe.rule == "loss" and method.refits and adds_to_residual else "none"
    else:
        _check_refit(refit, space.forms, adds_to_residual, config.model_type)
    sites = as_planned(targeted, space.forms, fuse)
    resolved = speed_defaults(replace(recipe, refit=refit), sites, profile)
    steps = steps if engine is VLLM else {}
    check_reachable(sites, resolved, profile, steps, others)
    profile_used = replace(profile_used, note=profile_used.note + _lacking(sites, profile, resolved))
    return ResolvedRecipe(resolved, method, config.model_type, family, targeted, sites, profile_used, steps)


def _check_whole_attention(forms: Sequence[str], config: Any, gpus: int) -> None:
    """Refuse a form that keeps the last tokens as they are: for windows, whose caches drop tokens, and several GPUs."""
    form = next((name for name in forms if form_named(name).cache.exact_tokens), None)
    if form is not None and gpus > 1:
        problem = f"form {form} with tensor_parallel={gpus}"
        raise PlanError(
            problem, "one GPU: no process rounds a part of the heads", "Leave the form out, or name latent."
        )
    if form is not None and (layers := sliding_layers(config)):
        problem = f"form {form} for a {config.model_type} model with sliding windows in {len(layers)} layers"
        raise PlanError(problem, "a model whose layers all attend to all tokens", "Leave it out, or name latent.")


def without_needless_runs(resolved: ResolvedRecipe, profile: Profile) -> ResolvedRecipe:
    """Leave out the forms that need runs of the model to be measured, where the dense model is within every limit.

    No choice loses less than the dense one, so these forms would be measured in vain. Where GAC's plugin serves the
    dense model faster than the engine does, a limit below 1 can be met so.
    """
    recipe, space, run = resolved.recipe, resolved.recipe.space, resolved.recipe.deployment
    needless = [name for name in space.forms if form_named(name).loss.needs_forward_runs]
    is_exact = recipe.rule == "loss" and not resolved.method.forms
    if not needless or not is_exact or not run.fuse or space.schemes != (DEFAULT_SCHEME,):
        return resolved
    dense = DenseModel.of(resolved.sites, profile, run, resolved.steps)
    if any((total(dense.sets, column) or 0) > limit for column, limit in dense.allowed(recipe).items()):
        return resolved
    logger.info("the dense model is within every limit: form %s is not measured", ", ".join(needless))
    space = replace(space, forms=tuple(name for name in space.forms if name not in needless))
    sites = as_planned(resolved.targeted, space.forms, run.fuse)
    return replace(resolved, recipe=replace(recipe, space=space), sites=sites)


def _check_engine(engine: Engine, space: Space, run: Deployment, config: Any) -> None:
    if (unserved := engine.unserved(space.forms, space.schemes)) is not None:
        served = ", ".join(form.name for form in FORMS if form.served)
        experts = ", ".join(scheme.name for scheme in SCHEMES if engine.runs_experts(scheme))
        expected = f"the forms {served}, which it runs at full speed, schemes with kernels, and experts in {experts}"
        remedy = f"Leave it out, or plan for {TRANSFORMERS.name}."
        raise PlanError(f"{unserved} for engine {engine.name}", expected, remedy)
    if engine.plugin and (mixtures := _mixtures_instead(config, space)):
        problem = f"a {config.model_type}, a mixture of experts, for engine {engine.name} with forms {_listed(space)}"
        raise PlanError(problem, f"one of {', '.join(mixtures)}", f"Plan for {TRANSFORMERS.name}.")
    if engine.shares and run.fuse is False:
        raise GacError(f"fuse=False for engine {engine.name}", "shared GEMMs, which it always has", "Leave fuse out.")


def _mixtures_instead(config: Any, space: Space) -> tuple[str, ...]:
    """Return the mixtures that vLLM runs with these forms, where the model is one that it does not run so."""
    if not experts_of(config):
        return ()
    from gac.runtime.vllm.check import FEWER_EXPERTS, SERVED_MIXTURES, is_served  # loads torch

    taking = any(form_named(name).loss.uses_routed_tokens for name in space.forms)
    served = FEWER_EXPERTS if taking else SERVED_MIXTURES
    return () if is_served(config) and config.model_type in served else served


def _listed(space: Space) -> str:
    return ", ".join(space.forms) or "none"


def engine_steps(config: Any, run: Deployment, profile: Profile, schemes: Sequence[str] = ()) -> dict[str, Step]:
    """Whole steps of the dense model in vLLM by workload, where the profile has them, and vLLM is not ruled out.

    Args:
        schemes: that plans may use: GEMMs in them have a scale of their own where the profile has steps in them.
    """
    if run.engine == TRANSFORMERS.name or run.tensor_parallel > 1:
        return {}
    times = {
        str(workload): [int(profile.point(operation, DTYPE) or 0) for operation in steps_of(config, workload)]
        for workload in run.parsed
    }
    if not (known := {name: steps for name, steps in times.items() if steps and 0 not in steps[:2]}):
        return {}
    served = replace(run, engine=VLLM.name, workloads=tuple(known))
    full, half = (
        DenseModel.of(family_of(each).sites(each, routed=True), profile, served)
        for each in (config, with_half_mlps(config))
    )
    pairs = _all_paired(family_of(config).sites(config), full.timing)
    count, steps = sum(len(rows.dims[0]) for rows in pairs), {}
    for (name, known_ns), gemms, fewer in zip(known.items(), full.gemms_ns, half.gemms_ns, strict=True):
        dense_ns, served_ns, halved_ns, paired_ns = known_ns
        scale, launches, in_pairs = _scale(served_ns, halved_ns, gemms, fewer), Fraction(0), total(pairs, ns_of(name))
        if paired_ns and gemms is not None and in_pairs is not None:  # older tables have no step of pairs
            launches = max(launches, paired_ns - served_ns - scale * (in_pairs - gemms))
        steps[name] = Step(dense_ns, served_ns, scale, round(launches / count))
    in_schemes = _scales_in_schemes(config, profile, served, steps, schemes)
    return {name: replace(step, in_schemes=in_schemes[name]) for name, step in steps.items()}


def _scales_in_schemes(
    config: Any, profile: Profile, run: Deployment, steps: Mapping[str, Step], schemes: Sequence[str]
) -> dict[str, dict[str, Fraction]]:
    """Return by workload the scale of GEMMs in each scheme of which the profile has steps (``Step.in_schemes``)."""
    scales = {name: dict[str, Fraction]() for name in steps}
    for scheme in (scheme for scheme in map(scheme_named, schemes) if scheme.name != DEFAULT_SCHEME):
        sites = sites_in(scheme, config)
        rest = dict(zip(steps, DenseModel.of(sites, profile, run, steps).rest_ns, strict=True))
        for workload, gemms in zip(run.parsed, DenseModel.of(sites, profile, run, scheme=scheme).gemms_ns, strict=True):
            ns = profile.point(steps_of(config, workload)[1], scheme.dtype)
            if ns is not None and gemms:
                share = Fraction(int(ns) - rest[str(workload)], gemms)
                scales[str(workload)][scheme.name] = max(Fraction(0), share.limit_denominator(1024))
    return scales


def _all_paired(sites: Sequence[Site], timing: Timing) -> list[CandidateSet]:
    sets = []
    for site in fuse_sites(sites):
        ranks = [np.array([paired_rank(weight)]) for weight in site.weights]
        sets.append(zip_candidates(site, [PAIR] * len(ranks), ranks, BF16, timing))
    return sets


def _scale(served_ns: int, halved_ns: int, gemms_ns: int | None, fewer_ns: int | None) -> Fraction:
    """Return the time that a step saves for each ns that its GEMMs save; 1 where that is unknown."""
    if not halved_ns or gemms_ns is None or fewer_ns is None or fewer_ns >= gemms_ns:
        return Fraction(1)
    return max(Fraction(0), Fraction(served_ns - halved_ns, gemms_ns - fewer_ns).limit_denominator(1024))


def _with_method_forms(recipe: Recipe, method: "Method") -> Recipe:
    """Give a method that has forms of its own these forms, and read the budget as that of the KV cache."""
    forms, limits = recipe.space.forms, recipe.limits
    if isinstance(limits.params, str):
        problem = f"method {method.name} with budget {limits.params!r}"
        raise BudgetError(problem, "a fraction: its budget is of the KV cache", "Give a fraction such as 0.8.")
    if forms not in (DEFAULT_FORMS, method.forms):
        problem = f"method {method.name} with forms {', '.join(forms)}"
        raise GacError(problem, f"its own, {', '.join(method.forms)}", "Leave the forms out.")
    if limits.kv_cache is None:
        limits = replace(limits, params=1.0, kv_cache=limits.params)
    elif limits.budget < 1:
        problem = f"method {method.name} with budget {limits.budget:g} and a KV-cache limit of {limits.kv_cache:g}"
        raise GacError(problem, "a budget alone, the kept fraction of the KV cache", "Drop the KV-cache limit.")
    return replace(recipe, space=replace(recipe.space, forms=method.forms), limits=limits)


def speed_defaults(recipe: Recipe, sites: Sequence[Site], profile: Profile) -> Recipe:
    """Return the recipe with its latency limits and slack decided, see ``Recipe.slack`` and ``Limits.latency``.

    Where the profile lacks one of the schemes or has no latency of a form (``Form.timed``), no latency is limited, and
    no loss is given for speed. It has a scheme where it has the latency of all dense weights that can be stored in it.

    Raises:
        GacError: the GPUs do not divide every weight, see ``gac.forms.tensor_parallel.check_splits``, or no dim of a
            form.
        ProfileError: a latency is limited that the profile has in 16 bits and lacks in a scheme, or that no
            profile has of a form; or it lacks the collectives of a split model, and not every latency is allowed.
    """
    exact, limits, run, slack = recipe.rule == "loss", recipe.limits, recipe.deployment, recipe.slack
    if run.tensor_parallel > 1:
        check_splits(sites, run.tensor_parallel)
        check_forms_divide(sites, recipe.space, run.tensor_parallel)
        if limits.latency != {}:
            check_collectives(profile, run, sites)
    models = dense_by_scheme(sites, profile, recipe)
    known = {
        name: [str(workload) for workload, ns in zip(run.parsed, model.latency_ns, strict=True) if ns is not None]
        for name, model in models.items()
    }
    forms, timing = [*map(form_named, recipe.space.forms)], models[DEFAULT_SCHEME].timing
    untimed = [form for form in forms if not (form.latency.timed or has_attention_latency(timing, form, sites))]
    if limits.latency or slack:
        _check_timed(recipe, sites, profile, known, untimed)
    timed = not untimed and all(in_scheme == known[DEFAULT_SCHEME] for in_scheme in known.values())
    if slack is None:
        slack = SLACK if exact and not limits.latency and timed else 0.0
    if limits.latency is None:
        limits = replace(limits, latency=dict.fromkeys(known[DEFAULT_SCHEME] if exact and timed else (), 1.0))
    return replace(recipe, limits=limits, slack=slack)


def _lacking(sites: Sequence[Site], profile: Profile, recipe: Recipe) -> str:
    """Return the shipped table that has what the profile lacks, to follow the reason for the profile."""
    models = dense_by_scheme(sites, profile, recipe).values()
    columns = zip(recipe.deployment.workloads, *(model.latency_ns for model in models), strict=True)
    unknown = [workload for workload, *latency_ns in columns if None in latency_ns]
    shipped = shipped_table(sites, profile, recipe) if unknown else ""
    return f"; it lacks {', '.join(unknown)}.{shipped}".removesuffix(".") if shipped else ""


def _check_timed(
    recipe: Recipe,
    sites: Sequence[Site],
    profile: Profile,
    known: Mapping[str, Sequence[str]],
    untimed: Sequence[Form],
) -> None:
    """Refuse a limit of latency, or loss for speed, where the profile lacks a scheme or the latency of a form."""
    workloads = recipe.deployment.workloads
    command = profile_command("NAME", recipe, *workloads)
    limited = [workload for workload in known[DEFAULT_SCHEME] if workload in (recipe.limits.latency or ())]
    for name, in_scheme in known.items():
        if lacking := [workload for workload in limited if workload not in in_scheme]:
            raise ProfileError(
                f"a limit of latency for {lacking[0]} with scheme {name}, which the profile does not have",
                f"schemes that it was measured in, such as {DEFAULT_SCHEME}",
                f"Measure it with {command}, or plan without one of the two.{shipped_table(sites, profile, recipe)}",
            )
    if untimed:
        form, remedy = untimed[0], "Leave the form out, or plan without the limit."
        # Tables can have the latency of a form that attention reads; of others they cannot.
        weights = [weight for site in sites for weight in site.weights]
        variants = [(variant, weight) for weight in weights for variant in form.variants(weight)]
        measurable = any(variant.applies_to(weight) and variant.cache.axis(weight) for variant, weight in variants)
        if measurable and any(workload.startswith("decode") for workload in workloads):
            remedy = f"Measure it with {command}, or leave the form or the limit out."
        problem = f"a limit of latency, or loss for speed, with form {form.name}"
        raise ProfileError(problem, "forms whose latency is measured", remedy)


def _check_refit(refit: Refit, forms: Sequence[str], adds_to_residual: bool, model_type: str) -> None:
    if refit == "update":
        from gac.forms.tensors import tensors_of  # loads torch

        fitted = [form.name for form in FORMS if refit in tensors_of(form).refits]
        if not any(refit in tensors_of(form_named(name)).refits for name in forms):
            problem, expected = f"refit 'update' with forms {', '.join(forms) or 'none'}", ", ".join(fitted)
            raise GacError(problem, f"{expected} among the forms, which it fits", "Use refit='none'.")
    if refit == "residual" and not adds_to_residual:
        problem = f"refit {refit!r} of model type {model_type}, in which the residual stream itself passes norms"
        raise GacError(problem, "layers that only add to the residual stream", "Use refit='none'.")


def check_shots(recipe: Recipe, method: "Method", sites: Sequence[Site], model_type: str) -> None:
    """Refuse two shots where the method, the rule or the layers do not allow them.

    Args:
        sites: the family's.

    Raises:
        GacError: the method measures errors without gradients, the rule is a peer's, or the first shot could not be
            fitted again.
    """
    if not method.two_sided:
        known = ", ".join(each.name for each in METHODS if each.two_sided)
        problem = f"shots=2 with method {method.name}, which measures errors without the gradients of single outputs"
        raise GacError(problem, f"method {known}, whose gradients a second shot takes again", "Use shots=1.")
    if recipe.rule != "loss":
        problem = f"shots=2 with rule {recipe.rule}"
        raise GacError(problem, "rule loss: the others are compared as they come, in one shot", "Use shots=1.")
    if not any(weight.to_residual for site in sites for weight in site.weights):
        problem = f"shots=2 of model type {model_type}, in which the residual stream itself passes norms"
        expected = "layers that only add to the residual stream, for the first shot is fitted again to that"
        raise GacError(problem, expected, "Use shots=1.")
