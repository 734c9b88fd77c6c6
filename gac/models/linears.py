"""The one place that knows how a dense model stores a linear weight."""

from collections.abc import Iterable

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from gac.core.errors import ModelError
from gac.models.digests import read_parameter
from gac.models.sites import Weight


def as_linear(module: nn.Module) -> nn.Module:
    """A linear weight as ``nn.Linear``, with W of shape ``(out, in)``; any other module as it is.

    GPT-2's ``Conv1D`` keeps W as ``(in, out)``: what is returned for it has the same bias and looks at the same memory.
    """
    if not isinstance(module, Conv1D):
        return module
    linear = nn.Linear(module.nx, module.nf, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().T, module.weight.requires_grad)
    linear.bias = module.bias
    return linear.train(module.training)


def linear_at(model: nn.Module, name: str) -> nn.Linear:
    linear = as_linear(model.get_submodule(name))
    assert isinstance(linear, nn.Linear), f"{name} is a {type(linear).__name__}"
    return linear


def check_sizes(model: nn.Module, weights: Iterable[Weight]) -> None:
    for weight in weights:
        linear = linear_at(model, weight.name)
        sizes = linear.out_features, linear.in_features
        if sizes != (weight.out_features, weight.in_features):
            raise ModelError(
                f"{weight.name} has {sizes[0]} outputs and {sizes[1]} inputs",
                f"{weight.out_features} and {weight.in_features}, as the config says",
                "Remove keys from the config that this architecture does not read.",
            )


def read_weight(model: nn.Module, name: str) -> Tensor:
    """W of the linear weight of this name, shape ``(out, in)``; errors as for ``read_parameter``."""
    values = read_parameter(model, f"{name}.weight")
    return values.T if isinstance(model.get_submodule(name), Conv1D) else values
