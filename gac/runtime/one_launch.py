"""Norms, gated products and rotary embeddings of a model that run in one launch each, on a GPU and in 16 bits.

They are found by running them, so it does not matter what an architecture calls them. Where no kernel can run, with
gradients (but for rotary embeddings) and in compiled code (which fuses them itself) their own ``forward`` runs. Modules
and their names stay.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .replaced import Forward, can_run
from .rotary import RotaryAttention, applies_rotary
from .rows import ACTIVATIONS, NORMS, gated, normed

_ACTIVATION = ("act_fn", "activation_fn")
_GATED = ((("gate_proj", "up_proj"), "down_proj"), (("gate_up_proj",), "down_proj"))
"""What transformers calls the weights of a gated MLP: those that write, and the one that reads."""


def run_in_one_launch(model: nn.Module) -> None:
    """Let its norms, gated MLPs and rotary embeddings do so; the model is changed in place.

    What is offloaded stays as it is, and so does what has a ``forward`` of its own, as a skipped block has.
    """
    for module in model.modules():
        if "forward" in vars(module) or any(tensor.is_meta for tensor in module.parameters(recurse=False)):
            continue
        if kind := norm_of(module):
            module.forward = Norm(module, kind)
        elif (found := _gated_of(module)) and (kind := activation_of(module.get_submodule(found[0]))):
            module.forward = Product(module, kind, *found)
        elif applies_rotary(type(module)):
            module.forward = RotaryAttention(module)


class Norm(Forward):
    """An RMSNorm in one launch.

    Args:
        kind: in ``NORMS``.
    """

    def __init__(self, norm: nn.Module, kind: str) -> None:
        super().__init__(norm)
        self.kind, self._eps = kind, eps_of(norm)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        if self.module.training or not can_run(hidden_states, weight):
            y: Tensor = self.plain(hidden_states)
            return y
        return normed(hidden_states, weight, self._eps, self.kind)


class Product(Forward):
    """A gated MLP that makes act(gate) * up in one launch.

    Args:
        kind: in ``ACTIVATIONS``.
        by: the name in the MLP of its activation, whose hooks would see its output.
        up: those of the weights that write gate and up; or of the one that writes both.
        down: that of the weight that reads the product.
    """

    def __init__(self, mlp: nn.Module, kind: str, by: str, up: Sequence[str], down: str) -> None:
        super().__init__(mlp)
        self._kind, self._by, self._up, self._down = kind, by, tuple(up), down

    def __call__(self, x: Tensor) -> Tensor:
        seen = self.module.get_submodule(self._by)
        if self.module.training or seen._forward_hooks or seen._forward_pre_hooks or not can_run(x):
            y: Tensor = self.plain(x)
        else:
            parts = [getattr(self.module, name)(x) for name in self._up]
            gate, up = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
            y = getattr(self.module, self._down)(gated(gate, up, self._kind))
        return y


def norm_of(norm: Any) -> str | None:
    """Which of ``NORMS`` it is, found by running it with another weight; None: another one, or none."""
    if (eps := eps_of(norm)) is None or [name for name, _ in norm.named_parameters()] != ["weight"]:
        return None
    size = norm.weight.numel()
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(0), device="cpu").bfloat16()
    x[1] *= 1e-3  # where eps tells
    weight = nn.Parameter(torch.linspace(0.3, 3, size, device="cpu").bfloat16(), requires_grad=False)
    alone = copy.copy(norm)
    alone._parameters = alone._parameters | {"weight": weight}
    y = type(norm).forward(alone, x)
    return next((kind for kind, plain in NORMS.items() if torch.equal(y, plain(x, weight, eps))), None)


def eps_of(norm: nn.Module) -> Any:
    """What an RMSNorm adds to the mean of the squares; None: it has none."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def activation_of(activation: nn.Module) -> str | None:
    """Which of ``ACTIVATIONS`` it is, found by running it; None: another one."""
    x = torch.linspace(-9, 9, 64, device="cpu")
    if any(True for _ in activation.parameters()):
        return None
    y = activation(x)
    return next((kind for kind, plain in ACTIVATIONS.items() if torch.equal(y, plain(x))), None)


def _gated_of(mlp: nn.Module) -> tuple[str, tuple[str, ...], str] | None:
    """The names in a gated MLP as ``Product`` takes them, where it does that and no more, found by running it."""
    children = set(mlp._modules)
    for by in _ACTIVATION:
        for up, down in _GATED:
            if children == {by, *up, down} and _multiplies(mlp, by, up, down):
                return by, up, down
    return None


def _multiplies(mlp: nn.Module, by: str, up: Sequence[str], down: str) -> bool:
    x = torch.linspace(-2, 2, 8, device="cpu").view(1, 8)
    written = [x + 3, x * x] if len(up) == 2 else [torch.cat((x + 3, x * x), dim=-1)]
    alone = copy.copy(mlp)
    alone._modules = alone._modules | dict(zip(up, map(_Says, written), strict=True)) | {down: nn.Identity()}
    return torch.equal(type(mlp).forward(alone, x), alone.get_submodule(by)(x + 3) * (x * x))


class _Says(nn.Module):
    """Hands out one tensor, whatever it is called with."""

    def __init__(self, said: Tensor) -> None:
        super().__init__()
        self._said = said

    def forward(self, _: Tensor) -> Tensor:
        return self._said
