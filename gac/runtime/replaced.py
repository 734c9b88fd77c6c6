"""Modules of a model that run in kernels of GAC where these can run, and as they are elsewhere."""

from typing import Any

import torch
from torch import Tensor, nn

from .gpu import lacking


def can_run(*given: Tensor) -> bool:
    """Whether a kernel can run of such tensors: of one dtype, on one GPU, without gradients, not compiled."""
    return not torch.is_grad_enabled() and can_launch(*given) and all(one.dtype == given[0].dtype for one in given)


def can_launch(*given: Tensor) -> bool:
    """Whether a kernel can be launched on them: plain tensors of one GPU, the first in 16 bits, not compiled."""
    first = given[0]
    return (
        not torch.compiler.is_compiling()
        and first.numel() > 0
        and lacking(first.device, first.dtype) is None
        and all(type(one) in (Tensor, nn.Parameter) and one.device == first.device for one in given)
    )


class Forward:
    """Stands before the ``forward`` of a module, which runs where no kernel can."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._before = vars(module).get("forward")  # accelerate's, where it has hooks; or another of these

    def plain(self, *args: Any, **options: Any) -> Any:
        """The module's own."""
        if self._before is not None:
            return self._before(*args, **options)
        return type(self.module).forward(self.module, *args, **options)
