"""Rounding what was built to the schemes of a plan."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from gac.linalg import cholesky, damped
from gac.models.linears import as_linear
from gac.plan import WeightChoice
from gac.runtime.modules import LowRankLinear
from gac.schemes import Scheme, scheme_named

LATENTS = 1e-6
"""Damping of what a second factor is solved with for the first one as it was rounded, see ``gac.linalg.damped``."""


def store_all(modules: Mapping[str, nn.Module], weights: Iterable[WeightChoice]) -> None:
    """Round the modules in place, each in the scheme of its weight; what they are multiplied with is not known."""
    schemes = {choice.name: scheme_named(choice.scheme) for choice in weights}
    for name, module in modules.items():
        store(schemes[name], module)


@torch.no_grad()
def store(scheme: Scheme, module: nn.Module, inputs: Tensor | None = None, gradients: Tensor | None = None) -> None:
    """Round a module in place.

    Args:
        inputs: E[x x^T] of what it reads, shape ``(in, in)``; None where that is not known.
        gradients: E[g g^T] of the gradients of the dense weight's outputs; None where rows do not make up for one
            another. Not used where there are fewer outputs.
    """
    if scheme.lossy:
        for values, seen, rows in _matrices(module, inputs, gradients):
            matrix = values.flatten(0, -2)
            behind = rows if rows is not None and len(rows) == len(matrix) else None
            values.copy_(scheme.rounded(matrix, seen, behind).view_as(values))


_Matrix = tuple[Tensor, Tensor | None, Tensor | None]


def _matrices(module: nn.Module, inputs: Tensor | None, gradients: Tensor | None) -> Iterator[_Matrix]:
    """Its matrices in the order in which they run, each with the moments of what it reads and writes by then."""
    if isinstance(module, LowRankLinear):
        first, second = module.first.weight, module.second.weight
        if inputs is None or not isinstance(module.second, nn.Linear):
            yield from ((first, inputs, None), (second, None, None))
            return
        before = first.double()
        yield first, inputs, None
        seen = inputs.double() @ first.double().T
        latents = first.double() @ seen
        solved = torch.cholesky_solve(seen.T @ before.T, cholesky(damped(latents, LATENTS)))
        second.copy_(second.double() @ solved.T)
        yield second, latents, gradients
    elif isinstance(weight := getattr(as_linear(module), "weight", None), Tensor):
        yield weight, inputs, gradients
