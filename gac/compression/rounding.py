"""Rounding what was built to the schemes of a plan."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from gac.models.linears import as_linear
from gac.plan import WeightChoice
from gac.runtime.modules import LowRankLinear
from gac.runtime.rounded_inputs import round_inputs
from gac.schemes import Scheme, scheme_named


def store_all(modules: Mapping[str, nn.Module], weights: Iterable[WeightChoice]) -> None:
    """Round the modules in place, each in the scheme of its weight; what they are multiplied with is not known."""
    schemes = {choice.name: scheme_named(choice.scheme) for choice in weights}
    for name, module in modules.items():
        store(schemes[name], module)


@torch.no_grad()
def store(scheme: Scheme, module: nn.Module, inputs: Tensor | None = None) -> None:
    """Round a module in place; where the scheme rounds inputs too, it does so from now on.

    Args:
        inputs: E[x x^T] of what it reads, shape ``(in, in)``; None where that is not known.
    """
    if scheme.lossy:
        for values, seen in _matrices(module, inputs):
            values.copy_(scheme.rounded(values.flatten(0, -2), seen).view_as(values))
    if scheme.reads is not None:
        round_inputs(module, scheme.reads)


def _matrices(module: nn.Module, inputs: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Its matrices in the order in which they run, each with the moment of what it is multiplied with by then."""
    if isinstance(module, LowRankLinear):
        yield module.first.weight, inputs
        if inputs is not None and isinstance(module.second, nn.Linear):
            first = module.first.weight.double()
            yield module.second.weight, first @ inputs.double() @ first.T
        else:
            yield module.second.weight, None
    elif isinstance(weight := getattr(as_linear(module), "weight", None), Tensor):
        yield weight, inputs
