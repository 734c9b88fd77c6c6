"""Models whose linear weights multiply one row in Triton, see ``decode_kernel``."""

from typing import Any

from torch import Tensor, nn

from .decode_kernel import multiply, prepare
from .modules import ValueLinear
from .shared_gemm import FusedInput


class DecodeLinear(nn.Linear):
    """A linear weight that multiplies one row in Triton."""

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias)


def use_decode_kernel(model: Any) -> None:
    """Let every linear weight but the head multiply one row in Triton; the model is changed in place.

    Parameters and their names stay. Quantised weights, which are other modules, run as before.

    Args:
        model: a causal LM of transformers, or the model within.
    """
    prepare()
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            module.__class__ = DecodeLinear
        elif isinstance(module, FusedInput | ValueLinear):
            module.multiply = multiply
