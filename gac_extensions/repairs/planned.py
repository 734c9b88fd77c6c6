"""Checkpoints with a plan: GAC's own, whose plan is recounted after padding, and those that become GAC's."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from gac.checkpoint.classes import auto_map, classes_of
from gac.checkpoint.files import read_plan
from gac.checkpoint.header import digest_of
from gac.core.errors import CheckpointError
from gac.core.untrusted import file_digest
from gac.core.version import __version__
from gac.forms import form_named
from gac.forms.planned_sites import as_planned
from gac.plan.costs import COSTS, PARAMS
from gac.plan.evidence import UNMEASURED, Measured, ProfileUsed
from gac.plan.plan import SCHEMA, Certificate, Limit, Plan, Prediction, SiteChoice, WeightChoice, counted
from gac.plan.recipe import Recipe
from gac.runtime.contract import COMPRESSED, chooses_code
from gac.runtime.contract import SCHEMA as HEADER_SCHEMA
from gac.schemes import scheme_named
from gac_extensions.repairs.dims import Dims, Run, SharedDim, stored_places, with_dims
from gac_extensions.repairs.layouts import dense_model
from gac_extensions.repairs.weight_files import Source


def planned_dims(source: Source) -> Iterator[SharedDim]:
    """The weights that are not dense; weights of one site whose shortened sides meet share a dim.

    The width that the forms of a site are named after (``narrow_pair:104``) stays. A CheckpointError says if weights
    are quantised, so that no zeros can be put between numbers, or differ from the plan.
    """
    plan = read_plan(source.directory)
    schemes = {*(choice.scheme for choice in plan.weights), plan.recipe.space.head}
    if stored := sorted(name for name in schemes if scheme_named(name).storage):
        problem = f"{source.directory} has weights in {', '.join(stored)}"
        raise CheckpointError(problem, "weights in 16 or 32 bits", "Allocate with --align, and compress again.")
    for site in plan.sites:
        names_a_form = any(form_named(choice.form).parent_form_name for choice in site.weights)
        shortened = [choice for choice in site.weights if form_named(choice.form).latency.axis(choice.weight)]
        for name in dict.fromkeys(_owner(site, choice) for choice in shortened):
            if names_a_form and name == site.site:
                continue
            choices = [choice for choice in shortened if _owner(site, choice) == name]
            form, most = choices[0].form, min(form_named(choice.form).full(choice.weight) for choice in choices)
            timed = [] if form_named(form).dim_counts_units else choices
            runs = tuple(run for choice in timed for run in _runs(name, choice))
            places = stored_places(source, choices, "as plan.json says")
            yield SharedDim(name, choices[0].dim, places, runs, most, form=form)


def _owner(site: SiteChoice, choice: WeightChoice) -> str:
    return site.site if form_named(choice.form).shortens(choice.weight) else choice.name


def _runs(name: str, choice: WeightChoice) -> Iterator[Run]:
    """The GEMMs of a weight as functions of its dim, from those for a single row at dim 1 and at dim 2."""
    latency, weight = form_named(choice.form).latency, choice.weight
    at_1, at_2 = (
        (latency.operation(weight, dim, 1),) if latency.timed else latency.gemms(weight, dim, 1) for dim in (1, 2)
    )
    for first, second in zip(at_1, at_2, strict=True):
        axis = next(axis for axis, size in first.axes.items() if size != second.axes[axis])
        factor = second.axes[axis] - first.axes[axis]
        fixed = {other: size for other, size in first.axes.items() if other not in ("m", axis)}
        yield Run(first.operator, fixed, axis, {name: factor}, first.axes[axis] - factor)


def padded_plan(plan: Plan, dims: Dims) -> Plan:
    """The plan with new dims (by the name of the weight, or of the site that is shortened as a whole), recounted.

    Zeros change no output, so the loss stays. The proof that no choice within the budget loses less is void. Latencies
    and the alternatives of the sites are dropped, since they belong to other dims.
    """
    sites = []
    for site in plan.sites:
        weights = tuple(replace(choice, dim=dims.get(_owner(site, choice), choice.dim)) for choice in site.weights)
        params = sum(choice.params for choice in weights)
        sites.append(replace(site, weights=weights, params=params, latency_ns=(), alternatives=()))
    recipe, proof = plan.recipe, plan.certificate
    limits, prices = [], []
    for limit, price in zip(plan.limits, proof.multipliers, strict=True):
        if limit.column in COSTS:
            used, _ = counted([choice for site in sites for choice in site.weights], limit.column)
            limits.append(replace(limit, used=used, over=max(0, used - limit.limit)))
            prices.append(price)
    deployment, recipe_limits = replace(recipe.deployment, workloads=()), replace(recipe.limits, latency={})
    method = f"{proof.method}; zero-padded by gac repair"
    return replace(
        plan,
        recipe=replace(recipe, deployment=deployment, limits=recipe_limits),
        sites=tuple(sites),
        limits=tuple(limits),
        certificate=replace(proof, status="feasible", method=method, multipliers=tuple(prices)),
        workloads=(),
    )


def adopt(
    source: Source, shared: Sequence[SharedDim], dims: Dims, profile: ProfileUsed
) -> tuple[Plan, dict[str, Any]] | None:
    """Return the plan and the config that make a checkpoint GAC's, if only GAC's forms can describe its weights.

    The plan states the form and the dim of every weight, from the tensors; nothing was decided or measured for it. The
    config's key ``gac`` is to be filled from the plan. A CheckpointError says if weights are missing or unexpected.
    """
    if not any(dim.fixed for dim in shared):
        return None
    config = with_dims(source.config, shared, dims)
    dense = dense_model(config)
    assert dense.family is not None, "an attention with fewer heads has a family"
    # room for the widest MLP, which zeros may have made wider than any was
    widths = (dims[dim.name] for dim in shared if not dim.fixed)
    config[dense.family.neurons] = max(getattr(dense.config, dense.family.neurons), *widths)
    dense = dense_model(config)
    chosen = {dim.name: (dim.form, dims[dim.name]) for dim in shared if dim.form}
    forms = tuple(dict.fromkeys(form for form, _ in chosen.values()))
    sites = []
    for site in as_planned(dense.sites, forms, fused=False):
        form, dim = chosen.get(site.name, ("dense", 0))
        choices = []
        for weight in site.weights:
            changed = form != "dense" and dim != form_named(form).full(weight)
            dense_choice = WeightChoice(weight, "dense", form_named("dense").full(weight))
            choices.append(WeightChoice(weight, form, dim) if changed else dense_choice)
        params = sum(choice.params for choice in choices)
        sites.append(SiteChoice(site.name, site.layer, site.kind, tuple(choices), params, site.params, 0.0, ()))
    classes = classes_of(dense.config.model_type)
    config = {name: value for name, value in config.items() if not chooses_code(name)} | {
        "model_type": COMPRESSED + dense.config.model_type,
        "architectures": [classes.causal_lm.__name__],
        "auto_map": auto_map(classes),
        "gac": {"schema_version": HEADER_SCHEMA},
    }
    return _plan(source, dense.config, forms, tuple(sites), profile), config


def _plan(
    source: Source, config: Any, forms: Sequence[str], sites: tuple[SiteChoice, ...], profile: ProfileUsed
) -> Plan:
    used, total = sum(site.params for site in sites), sum(site.dense_params for site in sites)
    kept = used / total
    files = (file_digest(source.directory / file) for file in source.files)
    return Plan(
        schema_version=SCHEMA,
        gac_version=__version__,
        recipe=Recipe.of(kept, method="none", rule="none", refit="none", forms=forms, workloads=(), latency="any"),
        measured=Measured(
            model=str(source.directory),
            digest=digest_of("".join(files)),
            params=_dense_params(source, config),
            family=config.model_type,
            calibration=UNMEASURED,
            profile=profile,
            factor=1.0,
        ),
        limits=(Limit(PARAMS, kept, used, used, total),),
        workloads=(),
        prediction=Prediction(0.0, 1.0, 1.0),
        certificate=Certificate("feasible", 0.0, 0.0, 0.0, (0.0,), "none: read from the shapes of what others pruned"),
        sites=sites,
    )


def _dense_params(source: Source, config: Any) -> int:
    """Parameters of the dense model; the source must have all of its weights by name, and no others."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        model = kind(config)
    parameters, stored = dict(model.named_parameters()), source.tensors.keys()
    expected = f"every weight of a {type(model).__name__} as config.json describes it, and no other"
    if missing := sorted(parameters.keys() - stored - model.all_tied_weights_keys.keys()):
        raise source.contradiction(f"{missing[0]} is missing ({len(missing)} in all)", expected)
    added = sorted(name for name in stored - model.state_dict().keys() if name.endswith((".weight", ".bias")))
    if added:
        raise source.contradiction(f"{added[0]} is unexpected ({len(added)} in all)", expected)
    return sum(values.numel() for values in parameters.values())
