"""Storing what was built in the schemes of a plan."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gac.core.errors import PlanError
from gac.core.linalg import cholesky, damped
from gac.forms.decomposition import with_rotated_latents
from gac.measurement.calibration import CalibrationRun
from gac.measurement.curves import LayerFit
from gac.models.sites import Site
from gac.plan.plan import WeightChoice
from gac.runtime.modules import LowRankLinear
from gac.runtime.storage.experts import StoredExperts
from gac.runtime.storage.modules import StoredLinear, is_matrix, plain_state
from gac.schemes import Scheme, scheme_named
from gac.schemes.base import storage_of
from gac.schemes.feedback.order import Inputs

LATENTS = 1e-6
"""Damping of what a second factor is solved with for the quantised first factor, see ``gac.core.linalg.damped``."""


def store_all(
    run: CalibrationRun,
    modules: Mapping[str, nn.Module],
    weights: Sequence[WeightChoice],
    sites: Sequence[Site],
    fits: Mapping[int, LayerFit],
) -> dict[str, nn.Module]:
    """The modules, each in the scheme of its weight, rounded for what the dense model gives it.

    Of several processes each rounds some layers, and gives them to the others. ``fits`` hold the inputs of all weights.
    """
    schemes = {choice.name: scheme_named(choice.scheme) for choice in weights if choice.name in modules}
    lossy = {name: scheme for name, scheme in schemes.items() if scheme.lossy}
    quantised: dict[str, nn.Module] = {}
    for turn, (layer, fit) in enumerate(fits.items()):
        if not run.ranks.owns(turn):
            continue
        weights_of = (each for site in sites if site.layer == layer for each in site.weights)
        for weight in (each for each in weights_of if each.name in lossy and not each.is_routed):
            moments = fit.artifacts.moments(weight) if weight.scores else fit.artifacts.inputs(weight)
            gradients = run.method.gradients(moments) if weight.scores else None
            module = store(lossy[weight.name], modules[weight.name], run.method.inputs(moments), gradients)
            quantised[weight.name] = module
    return {**modules, **run.ranks.modules(quantised)}


@torch.no_grad()
def store(
    scheme: Scheme, module: nn.Module, inputs: Tensor | None = None, gradients: Tensor | None = None
) -> nn.Module:
    """The module with its matrices rounded to a scheme and in its storage; what is given is used up.

    Args:
        inputs: E[x x^T] of what the weight reads, shape ``(in, in)``; None where that is not known. Not used where it
            reads less.
        gradients: E[g g^T] of the gradients of the dense weight's outputs; None where rows do not make up for one
            another. Not used where there are fewer outputs.

    Raises:
        PlanError: the module has a matrix that no storage can hold.
    """
    if not scheme.lossy or isinstance(module, StoredExperts):  # which were built so
        return module
    if inputs is not None and getattr(module, "in_features", None) != len(inputs):
        inputs = None
    if not isinstance(module, LowRankLinear):
        return _stored(scheme, module, inputs, gradients)
    if isinstance(module.second, nn.Linear):
        return _stored_pair(scheme, module, module.second, inputs, gradients)
    for name, inputs_of_factor in (("first", inputs), ("second", None)):
        module.set_submodule(name, _stored(scheme, module.get_submodule(name), inputs_of_factor))
    return module


def _stored_pair(
    scheme: Scheme, module: LowRankLinear, second: nn.Linear, inputs: Tensor | None, gradients: Tensor | None
) -> nn.Module:
    """Quantise both factors with their latents rotated, the second solved for the quantised first."""
    b, a = with_rotated_latents(second.weight, module.first.weight)
    module.set_submodule("first", _stored(scheme, module.first, inputs, matrix=a))
    latents = None
    if inputs is not None:
        now = plain_state(module.first, second.weight.dtype)["weight"].double()
        seen = inputs.double() @ now.T
        latents = now @ seen
        b = b @ torch.cholesky_solve(seen.T @ a.T, cholesky(damped(latents, LATENTS))).T
    module.set_submodule("second", _stored(scheme, second, latents, gradients, matrix=b))
    return module


def _stored(
    scheme: Scheme,
    module: nn.Module,
    inputs: Tensor | None = None,
    gradients: Tensor | None = None,
    matrix: Tensor | None = None,
) -> nn.Module:
    """Quantise a module's matrix, or ``matrix`` in its place; of a module of several the inputs are not known."""
    if not is_matrix(module):
        for name, values in module.named_parameters(recurse=False):
            if values.dim() > 1:
                raise PlanError(
                    f"{name} of a {type(module).__name__} in {scheme.name}",
                    "matrices in nn.Linear, ValueLinear or BlockLinear, which a scheme can store",
                    "Put the matrix into one of these, or plan without the scheme.",
                )
        for name, child in module.named_children():
            setattr(module, name, _stored(scheme, child))
        return module
    values = module.get_parameter("weight")
    matrix, storage = values.flatten(0, -2) if matrix is None else matrix, storage_of(scheme)
    reads = None if inputs is None else Inputs(inputs)
    rows = gradients if gradients is not None and len(gradients) == len(matrix) else None
    if storage is None:
        values.copy_(scheme.quantised(matrix, reads, rows).view_as(values))
        return module
    tensors, stored = scheme.stored(matrix, reads, rows), StoredLinear.of(storage, module)
    stored.fill(tensors)
    return stored
