"""Turn a checkpoint that others pruned into one of GAC, if only GAC's forms can describe its weights.

Its plan states the form and the dim of every weight, from the tensors. Nothing was decided or measured for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from gac.checkpoint.classes import auto_map, classes_of
from gac.checkpoint.header import digest_of
from gac.core.untrusted import file_digest
from gac.core.version import __version__
from gac.forms import form_named
from gac.forms.planned_sites import as_planned
from gac.models.loading import is_checkpoint
from gac.models.sites import Site, Weight
from gac.plan.costs import PARAMS
from gac.plan.plan import (
    SCHEMA,
    UNMEASURED,
    Certificate,
    Limit,
    Measured,
    Plan,
    Prediction,
    ProfileUsed,
    SiteChoice,
    WeightChoice,
)
from gac.plan.recipe import Recipe
from gac.repairs.dims import Dims, SharedDim, with_dims
from gac.repairs.layouts.pruned import dense_model
from gac.repairs.weight_files import Source
from gac.runtime.contract import COMPRESSED, chooses_code
from gac.runtime.contract import SCHEMA as HEADER_SCHEMA


@dataclass(frozen=True)
class Adoption:
    """The plan and config that make a directory GAC's; the config's key ``gac`` is to be filled from the plan."""

    plan: Plan
    config: Mapping[str, Any]


def adopt(source: Source, shared: Sequence[SharedDim], dims: Dims, profile: ProfileUsed) -> Adoption | None:
    """None if the source is GAC's already, or if its own layout can state all of its dims.

    Raises:
        CheckpointError: weights of its architecture are missing, or there are others.
    """
    if is_checkpoint(source.directory) or not any(dim.fixed for dim in shared):
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
    planned = as_planned(dense.sites, forms, fused=False)
    sites = tuple(_site_choice(site, *chosen.get(site.name, ("dense", 0))) for site in planned)
    plan = _plan(source, dense.config, forms, sites, profile)
    model_type = dense.config.model_type
    classes = classes_of(model_type)
    config = {name: value for name, value in config.items() if not chooses_code(name)} | {
        "model_type": COMPRESSED + model_type,
        "architectures": [classes.causal_lm.__name__],
        "auto_map": auto_map(classes),
        "gac": {"schema_version": HEADER_SCHEMA},
    }
    return Adoption(plan, config)


def _site_choice(site: Site, form: str, dim: int) -> SiteChoice:
    weights = tuple(_weight_choice(weight, form, dim) for weight in site.weights)
    params = sum(choice.params for choice in weights)
    return SiteChoice(site.name, site.layer, site.kind, weights, params, site.params, 0.0, ())


def _weight_choice(weight: Weight, form: str, dim: int) -> WeightChoice:
    dense = form_named("dense")
    if form == dense.name or dim == form_named(form).full(weight):
        return WeightChoice(weight, dense.name, dense.full(weight))
    return WeightChoice(weight, form, dim)


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
