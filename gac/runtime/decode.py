"""Models whose linear weights multiply one row in Triton, see ``gac.runtime.decode_kernel``."""

from typing import Any

from torch import Tensor, nn

from gac.runtime.decode_kernel import multiply, prepare
from gac.runtime.modules import ValueLinear
from gac.runtime.shared_gemm import FusedInput


class OneRowLinear(nn.Linear):
    """A linear weight that multiplies one row in Triton."""

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias)


def run_one_row_in_triton(model: Any) -> None:
    """Let every linear weight but the head do so; the model is changed in place.

    Parameters and their names stay. What something else stands for, a quantised weight, runs as it did.

    Args:
        model: a causal LM of transformers, or the model within.
    """
    prepare()
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            module.__class__ = OneRowLinear
        elif isinstance(module, FusedInput | ValueLinear):
            module.multiply = multiply
