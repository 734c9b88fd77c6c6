"""A checkpoint that others pruned becomes one of GAC, where only GAC's forms can say what its weights are.

Its plan states the form and the dim of every weight, as the tensors have them. Nothing was weighed or measured for it.
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
from gac.forms import DENSE, form_named
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
from gac.repairs.dense import DenseModel, dense_model
from gac.repairs.shared_dims import Dims, SharedDim, with_dims
from gac.repairs.weight_files import Source
from gac.runtime.contract import COMPRESSED, chooses_code
from gac.runtime.contract import SCHEMA as HEADER_SCHEMA

Chosen = Mapping[str, tuple[str, int]]
"""By the site's name: its form and dim."""


@dataclass(frozen=True)
class Adopted:
    """What makes a directory one of GAC's; the key ``gac`` of the config is still to be filled from the plan."""

    plan: Plan
    config: Mapping[str, Any]


def adopted(source: Source, shared: Sequence[SharedDim], dims: Dims, profile: ProfileUsed) -> Adopted | None:
    """None where the source is GAC's already, or where its own layout can say all of its dims.

    Raises:
        CheckpointError: it has not all weights of its architecture, or others.
    """
    if is_checkpoint(source.directory) or not any(one.carried for one in shared):
        return None
    config = _widened(with_dims(source.config, shared, dims), shared, dims)
    dense = dense_model(config)
    chosen = {one.name: (one.form, dims[one.name]) for one in shared if one.form}
    forms = tuple(dict.fromkeys(form for form, _ in chosen.values()))
    sites = tuple(_site_choice(site, chosen) for site in as_planned(dense.sites, forms, fused=False))
    return Adopted(_plan(source, dense, forms, sites, profile), _compressed(config, dense.config.model_type))


def _widened(config: dict[str, Any], shared: Sequence[SharedDim], dims: Dims) -> dict[str, Any]:
    """The config with room for the widest MLP, where zeros made one wider than any was."""
    dense = dense_model(config)
    assert dense.family is not None, "heads are carried"
    key = dense.family.neurons
    widths = (dims[one.name] for one in shared if not one.carried)
    return config | {key: max(getattr(dense.config, key), *widths)}


def _compressed(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The config with the classes of compressed models; without keys that would choose other code."""
    classes = classes_of(model_type)
    return {name: value for name, value in config.items() if not chooses_code(name)} | {
        "model_type": COMPRESSED + model_type,
        "architectures": [classes.causal_lm.__name__],
        "auto_map": auto_map(classes),
        "gac": {"schema_version": HEADER_SCHEMA},
    }


def _site_choice(site: Site, chosen: Chosen) -> SiteChoice:
    form, dim = chosen.get(site.name, (DENSE.name, 0))
    weights = tuple(_weight_choice(weight, form, dim) for weight in site.weights)
    params = sum(one.params for one in weights)
    return SiteChoice(site.name, site.layer, site.kind, weights, params, site.params, 0.0, ())


def _weight_choice(weight: Weight, form: str, dim: int) -> WeightChoice:
    """Dense where the dim is the full one."""
    dense = DENSE
    if form == dense.name or dim == form_named(form).full(weight):
        return WeightChoice(weight, dense.name, dense.full(weight))
    return WeightChoice(weight, form, dim)


def _plan(
    source: Source, dense: DenseModel, forms: Sequence[str], sites: tuple[SiteChoice, ...], profile: ProfileUsed
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
            params=_whole(source, dense.config),
            family=dense.config.model_type,
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


def _whole(source: Source, config: Any) -> int:
    """The parameters of the whole dense model; all that it has by name has to be in the source, and no more."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        model = kind(config)
    parameters, stored = dict(model.named_parameters()), source.tensors.keys()
    if missing := sorted(parameters.keys() - stored - model.all_tied_weights_keys.keys()):
        raise source.contradiction(f"{missing[0]} is missing ({len(missing)} in all)", _every(model))
    added = sorted(name for name in stored - model.state_dict().keys() if name.endswith((".weight", ".bias")))
    if added:
        raise source.contradiction(f"{added[0]} is unexpected ({len(added)} in all)", _every(model))
    return sum(values.numel() for values in parameters.values())


def _every(model: Any) -> str:
    return f"every weight of a {type(model).__name__} as config.json describes it, and no other"
