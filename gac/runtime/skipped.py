"""Attentions and MLPs that do nothing are left out of the model, with the norms that only they read through."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn


class SkippedBlock(nn.Module):
    """Stands for an attention or MLP: what the weight writes through which it wrote, and nothing else runs.

    Its weights stay in it under their names, so files of weights are as without it. No keys and values are cached.

    Args:
        block: whose weights are ``Absent`` or ``Constant``.
        output: the name of the one through which it writes.
        attention: whether it returns attention weights too, of which there are none.
    """

    def __init__(self, block: nn.Module, output: str, attention: bool) -> None:
        super().__init__()
        for name, child in block.named_children():
            self.add_module(name, child)
        self._output, self._attention = output, attention
        self.train(block.training)

    def forward(self, *args: Any, **named: Any) -> Any:
        x: Tensor = args[0] if args else named["hidden_states"]
        written = self.get_submodule(self._output)(x)
        return (written, None) if self._attention else written


class PassedNorm(nn.Module):
    """Stands for a norm through which nothing is read any more, and keeps its parameters."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        for name, parameter in norm.named_parameters():
            self.register_parameter(name, nn.Parameter(parameter, parameter.requires_grad))

    def forward(self, x: Tensor) -> Tensor:
        return x


def skip_blocks(model: nn.Module, described: Sequence[Mapping[str, Any]]) -> None:
    """Leave blocks out; the model is changed in place, its outputs and its ``state_dict`` are not.

    Args:
        described: of each block its name (``block``), the name in it of the weight through which it writes
            (``output``), whether it is an ``attention``, and the names of its ``norms``.
    """
    for one in described:
        block = model.get_submodule(one["block"])
        if not isinstance(block, SkippedBlock):
            model.set_submodule(one["block"], SkippedBlock(block, one["output"], one["attention"]))
            for name in one["norms"]:
                model.set_submodule(name, PassedNorm(model.get_submodule(name)))
