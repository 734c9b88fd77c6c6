"""The modules that a plan asks for: which one each weight becomes, and which weights share their first GEMM."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gac.forms import form_named
from gac.forms.planned_sites import as_planned
from gac.models.sites import Site
from gac.plan import Plan, WeightChoice
from gac.runtime.modules import KINDS
from gac.runtime.shared_gemm import share_gemm


def empty_module(choice: WeightChoice, bias: bool, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    """The module of a weight's form at its dim; its parameters are allocated, not initialised.

    Args:
        bias: whether it adds one, as the dense weight did.
        device: where to put it; ``meta`` allocates nothing.
    """
    spec = form_named(choice.form).module(choice.weight, choice.dim)
    return KINDS[spec.module][0](**spec.sizes, bias=bias, device=device, dtype=dtype)


def merged(choice: WeightChoice, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The dense ``weight (out, in)``, and ``bias (out,)`` where there is one, of the same function up to rounding.

    Args:
        own: the parameters of the weight's module, by their names in it.
    """
    return form_named(choice.form).tensors.merge(choice.weight, choice.dim, own)


def planned_sites(plan: Plan, sites: Sequence[Site]) -> tuple[Site, ...]:
    """A family's sites as the plan decides on them, fused where it has them so."""
    shared = {choice.site for choice in plan.sites if choice.shared}
    planned = as_planned(sites, plan.recipe.space.forms, plan.recipe.deployment.fuse)
    return tuple(site.run(site.name in shared) if site.either else site for site in planned)


def shared_names(sites: Sequence[Site]) -> tuple[tuple[str, ...], ...]:
    """The names of the weights of each site whose first GEMMs run as one."""
    groups = (tuple(site.weights[at].name for at in site.fused) for site in sites)
    return tuple(names for names in groups if len(names) > 1)


def share_gemms(model: nn.Module, sites: Sequence[Site]) -> None:
    """Let the weights of each site that are marked as fused share one GEMM; the model is changed in place.

    Args:
        sites: from ``planned_sites``; nothing happens where none is marked.
    """
    for names in shared_names(sites):
        share_gemm(model, names)
