"""Modules of a model that run in kernels of GAC where these can run, and as they are elsewhere."""

import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from gac.runtime.kernels.elementwise.rows import (
    ACTIVATIONS,
    NORMS,
    gated,
    normed,
    plainly_rotated,
    rotated,
    write_to_cache,
)
from gac.runtime.kernels.gpu import unsupported_reason


def can_run(*value: Tensor) -> bool:
    """Return whether a kernel can run on tensors: of one dtype, on one GPU, without gradients, not compiled."""
    return not torch.is_grad_enabled() and can_launch(*value) and all(item.dtype == value[0].dtype for item in value)


def can_launch(*value: Tensor) -> bool:
    """Return whether a kernel can be launched on them: plain tensors of one GPU, the first in 16 bits, not compiled."""
    first = value[0]
    return (
        not torch.compiler.is_compiling()
        and first.numel() > 0
        and unsupported_reason(first.device, first.dtype) is None
        and all(type(item) in (Tensor, nn.Parameter) and item.device == first.device for item in value)
    )


class Forward:
    """Stands before the ``forward`` of a module, which runs where no kernel can."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._before = vars(module).get("forward")  # accelerate's, where it has hooks; or another of these

    def plain(self, *args: Any, **options: Any) -> Any:
        if self._before is not None:
            return self._before(*args, **options)
        return type(self.module).forward(self.module, *args, **options)


_ROTARY = "apply_rotary_pos_emb"


_now = local()  # ``rotating`` while a thread runs an attention whose model is to use the kernel


class FusedRotaryAttention(Forward):
    """An attention whose rotary embedding and static cache run in one launch each."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.plain(*args, **options)
        options |= {name: with_fused_updates(option) for name, option in options.items() if type(option) is StaticCache}
        outer, _now.rotating = getattr(_now, "rotating", False), True
        try:
            return self.plain(*args, **options)
        finally:
            _now.rotating = outer


def with_fused_updates(cache: Any) -> Any:
    """A static cache that is written to in one launch; any other as it is."""
    return _Static(cache) if type(cache) is StaticCache and not torch.compiler.is_compiling() else cache


class _Static:
    def __init__(self, cache: StaticCache) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        layer: Any = self._cache.layers[layer_idx]
        plain = type(layer).update is not StaticLayer.update or not layer.is_initialized
        if plain or getattr(self._cache, "offloading", False) or not can_run(keys, values, layer.keys, layer.values):
            return self._cache.update(keys, values, layer_idx, *args, **options)
        write_to_cache(keys, values, layer.keys, layer.values, layer.cumulative_length)
        layer.cumulative_length.add_(keys.shape[-2])
        return layer.keys, layer.values


def rotate_of(attention: type) -> Any:
    """The function by which its file rotates queries and keys; None where none does."""
    return getattr(sys.modules[attention.__module__], _ROTARY, None)


def rotates_plainly(attention: type) -> bool:
    rotate = rotate_of(attention)
    return rotate is not None and (hasattr(rotate, "is_fused") or _is_rotary(rotate))


def _applies_rotary(attention: type) -> bool:
    """Return whether its ``forward`` calls the function of its file, which is then replaced for all of them."""
    code = getattr(inspect.unwrap(attention.forward), "__code__", None)  # type: ignore[attr-defined]
    if code is None or _ROTARY not in code.co_names or not rotates_plainly(attention):
        return False
    rotate = rotate_of(attention)
    if not hasattr(rotate, "is_fused"):
        setattr(sys.modules[attention.__module__], _ROTARY, _fused_rotary(rotate))
    return True


def _fused_rotary(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def fused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        fits = not args and not options and cos.shape[-1] == q.shape[-1]
        if not getattr(_now, "rotating", False) or not fits or not _can_rotate(q, k, cos, sin):
            result: tuple[Tensor, Tensor] = plain(q, k, cos, sin, *args, **options)
            return result
        return rotated(q, k, cos, sin)

    fused.is_fused = True  # type: ignore[attr-defined]
    return fused


def _can_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    if not can_launch(q, k, cos, sin) or k.dtype != q.dtype:
        return False
    kind, angles = q.device.type, {cos.dtype, sin.dtype}
    narrowed = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == q.dtype
    return angles == {q.dtype} or (narrowed and angles == {torch.float32})


def _is_rotary(plain: Callable[..., Any]) -> bool:
    """True if a function finds what ``plainly_rotated`` does; not so where it takes other arguments."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8))
    inputs = [torch.randn(shape, generator=generator, device="cpu").bfloat16() for shape in shapes]
    try:
        return all(map(torch.equal, plain(*inputs), plainly_rotated(*inputs)))
    except (TypeError, ValueError, RuntimeError):
        return False


_ACTIVATIONS = ("act_fn", "activation_fn")
_GATED = (("gate_proj", "up_proj"), ("gate_up_proj",))
"""Names in transformers of the weights of a gated MLP that write the product; ``down_proj`` reads it."""


def fuse_elementwise(model: nn.Module) -> None:
    """Let norms, gated MLPs and rotary embeddings run in kernels; the model is changed in place.

    What is offloaded stays as it is, and so does what has a ``forward`` of its own, as a skipped block has.
    """
    for module in model.modules():
        if "forward" in vars(module) or any(tensor.is_meta for tensor in module.parameters(recurse=False)):
            continue
        if kind := norm_of(module):
            module.forward = Norm(module, kind)
        elif (names := _gated_of(module)) and (kind := _activation_of(module.get_submodule(names[0]))):
            module.forward = Product(module, kind, *names)
        elif _applies_rotary(type(module)):
            module.forward = FusedRotaryAttention(module)


class Norm(Forward):
    """An RMSNorm of a kind in ``NORMS``, in one launch."""

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

    ``kind`` is in ``ACTIVATIONS``; ``activation`` names the MLP's activation, whose hooks would see its output, ``up``
    the weights that write gate and up, or the one that writes both.
    """

    def __init__(self, mlp: nn.Module, kind: str, activation: str, up: Sequence[str]) -> None:
        super().__init__(mlp)
        self._kind, self._activation, self._up = kind, activation, tuple(up)

    def __call__(self, x: Tensor) -> Tensor:
        mlp: Any = self.module
        activation = mlp.get_submodule(self._activation)
        if mlp.training or activation._forward_hooks or activation._forward_pre_hooks or not can_run(x):
            y: Tensor = self.plain(x)
        else:
            parts = [getattr(mlp, name)(x) for name in self._up]
            gate, up = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
            y = mlp.down_proj(gated(gate, up, self._kind))
        return y


def norm_of(norm: Any) -> str | None:
    """Return which of ``NORMS`` it is, found by running it with another weight; None: none of them."""
    if (eps := eps_of(norm)) is None or [name for name, _ in norm.named_parameters()] != ["weight"]:
        return None
    if len(inspect.signature(type(norm).forward).parameters) != 2:  # a gate, too, as in linear attention
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
    """Return what an RMSNorm adds to the mean of the squares; None: it has none."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _activation_of(activation: nn.Module) -> str | None:
    """Return which of ``ACTIVATIONS`` it is, found by running it; None: another one."""
    if any(True for _ in activation.parameters()):
        return None
    x = torch.linspace(-9, 9, 64, device="cpu")
    y = activation(x)
    return next((kind for kind, plain in ACTIVATIONS.items() if torch.equal(y, plain(x))), None)


def _gated_of(mlp: nn.Module) -> tuple[str, tuple[str, ...]] | None:
    """Return the names of the activation of a gated MLP, and of the weights that write gate and up."""
    children = set(mlp._modules)
    for activation in _ACTIVATIONS:
        for up in _GATED:
            if children == {activation, *up, "down_proj"} and _multiplies(mlp, activation, up):
                return activation, up
    return None


def _multiplies(mlp: nn.Module, activation: str, up: Sequence[str]) -> bool:
    """True if the MLP computes act(gate) * up, found by running it with other weights."""
    x = torch.linspace(-2, 2, 8, device="cpu").view(1, 8)
    gate, other = x + 3, x * x
    outputs = [gate, other] if len(up) == 2 else [torch.cat((gate, other), dim=-1)]
    probe: Any = copy.copy(mlp)
    weights = {name: partial(_first, output) for name, output in zip(up, outputs, strict=True)}
    probe._modules = probe._modules | weights | {"down_proj": nn.Identity()}
    return torch.equal(type(mlp).forward(probe, x), probe.get_submodule(activation)(gate) * other)


def _first(output: Tensor, _: Tensor) -> Tensor:
    return output
