"""Attentions that apply the rotary embedding in one launch, and write to a static cache in another.

Transformers calls a function of the architecture's file for the embedding. In its place stands one that runs the
kernel, but only where such an attention calls it.
"""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from threading import local
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from .replaced import Forward, can_launch, can_run
from .rows import plainly_rotated, rotated, write_to_cache

_ROTARY = "apply_rotary_pos_emb"


class RotaryAttention(Forward):
    """An attention whose embedding and static cache run in these kernels."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.plain(*args, **options)
        options |= {name: in_one_launch(one) for name, one in options.items() if type(one) is StaticCache}
        now = rotate_of(type(self.module)).in_one_launch
        outer, now.rotating = now.rotating, True
        try:
            return self.plain(*args, **options)
        finally:
            now.rotating = outer


def in_one_launch(cache: Any) -> Any:
    """A static cache that is written to in one launch; any other as it is."""
    return _Static(cache) if type(cache) is StaticCache and not torch.compiler.is_compiling() else cache


class _Static:
    """A static cache, as an attention sees it."""

    def __init__(self, cache: StaticCache) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """As the cache does."""
        layer: Any = self._cache.layers[layer_idx]
        static = type(layer).update is StaticLayer.update and layer.is_initialized
        if (
            not static
            or getattr(self._cache, "offloading", False)
            or not can_run(keys, values, layer.keys, layer.values)
        ):
            found: tuple[Tensor, Tensor] = self._cache.update(keys, values, layer_idx, *args, **options)
            return found
        write_to_cache(keys, values, layer.keys, layer.values, layer.cumulative_length)
        layer.cumulative_length.add_(keys.shape[-2])
        return layer.keys, layer.values


class _Now(local):
    """Whether this thread runs such an attention."""

    rotating = False


def rotate_of(attention: type) -> Any:
    """The function by which its file rotates queries and keys; None where none does."""
    return getattr(sys.modules[attention.__module__], _ROTARY, None)


def applies_rotary(attention: type) -> bool:
    """Whether its ``forward`` calls the function of its file, which is then replaced for all models of the file."""
    code = getattr(inspect.unwrap(attention.forward), "__code__", None)  # type: ignore[attr-defined]
    plain = rotate_of(attention)
    if plain is None or code is None or _ROTARY not in code.co_names:
        return False
    if not hasattr(plain, "in_one_launch"):
        if not _is_rotary(plain):
            return False
        setattr(sys.modules[attention.__module__], _ROTARY, _in_one_launch(plain))
    return True


def rotates_plainly(attention: type) -> bool:
    """Whether the function of its file is ``plainly_rotated``."""
    plain = rotate_of(attention)
    return plain is not None and (hasattr(plain, "in_one_launch") or _is_rotary(plain))


def _in_one_launch(plain: Callable[..., Any]) -> Callable[..., Any]:
    now = _Now()

    @wraps(plain)
    def quick(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        fits = not args and not options and cos.shape[-1] == q.shape[-1]
        if not now.rotating or not fits or not _can_rotate(q, k, cos, sin):
            found: tuple[Tensor, Tensor] = plain(q, k, cos, sin, *args, **options)
            return found
        return rotated(q, k, cos, sin)

    quick.in_one_launch = now  # type: ignore[attr-defined]
    return quick


def _can_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel can run, with gradients too; what float32 angles rotate is read in 16 bits by autocast."""
    if not can_launch(q, k, cos, sin) or k.dtype != q.dtype:
        return False
    kind, angles = q.device.type, {cos.dtype, sin.dtype}
    narrowed = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == q.dtype
    return angles == {q.dtype} or (narrowed and angles == {torch.float32})


def _is_rotary(plain: Callable[..., Any]) -> bool:
    """Whether the function is ``plainly_rotated``, found by running it."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8))
    given = [torch.randn(shape, generator=generator, device="cpu").bfloat16() for shape in shapes]
    try:
        found = plain(*given)
    except (TypeError, ValueError, RuntimeError):  # of an architecture whose function takes something else
        return False
    return all(map(torch.equal, found, plainly_rotated(*given)))
