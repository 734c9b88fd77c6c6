"""The modules that a plan asks for: which one each weight becomes, and which weights share their first GEMM."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from gac.forms import Form, form_named
from gac.forms.grouped.spec import Grouped
from gac.forms.planned_sites import as_planned
from gac.models.sites import Site
from gac.models.weights import Weight
from gac.plan import Plan, WeightChoice
from gac.runtime.modules import KINDS
from gac.runtime.shared_gemm import share_gemm


def module_of(choice: WeightChoice) -> tuple[str, dict[str, int]]:
    """The module that a weight's form runs as at its dim: its name in ``KINDS``, and its sizes."""
    form = form_named(choice.form)
    name, sizes = _MODULES[form.kind](form, choice.weight, choice.dim)
    return name, dict(zip(KINDS[name][1], sizes, strict=True))


def empty_module(choice: WeightChoice, bias: bool, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    """The module that a weight's form runs as at its dim; its parameters are allocated, not initialised.

    Args:
        bias: whether it adds one, as the dense weight did.
        device: where to put it; ``meta`` allocates nothing.
    """
    name, sizes = module_of(choice)
    return KINDS[name][0](**sizes, bias=bias, device=device, dtype=dtype)


def planned_sites(plan: Plan, sites: Sequence[Site]) -> tuple[Site, ...]:
    """A family's sites as the plan decides on them, fused where it has them so."""
    shared = {choice.site for choice in plan.sites if choice.shared}
    planned = as_planned(sites, plan.forms, plan.fused)
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


_Built = tuple[str, tuple[int, ...]]


def _dense(form: Form, weight: Weight, dim: int) -> _Built:
    return "Linear", (weight.in_features, weight.out_features)


def _low_rank(form: Form, weight: Weight, dim: int) -> _Built:
    return "LowRankLinear", (weight.in_features, dim, weight.out_features)


def _narrow(form: Form, weight: Weight, dim: int) -> _Built:
    if weight.neurons == "out":
        return "Linear", (weight.in_features, weight.blocks * dim)
    return "Linear", (dim, weight.out_features)


def _head_dim(form: Form, weight: Weight, dim: int) -> _Built:
    if weight.values == "out":
        return "ValueLinear", (weight.in_features, weight.heads, dim)
    return "Linear", (weight.heads * dim, weight.out_features)


def _grouped(form: Form, weight: Weight, dim: int) -> _Built:
    assert isinstance(form, Grouped)
    return "GroupedLinear", (weight.in_features, form.groups(weight), dim, weight.out_features)


_MODULES: Mapping[str, Callable[[Form, Weight, int], _Built]] = MappingProxyType(
    {"dense": _dense, "low_rank": _low_rank, "narrow": _narrow, "head_dim": _head_dim, "grouped": _grouped}
)
