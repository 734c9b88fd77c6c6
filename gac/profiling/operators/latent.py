"""Attention of one new token over a cache of latents, in GAC's own kernel."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import sqrt
from typing import TYPE_CHECKING

from gac.core.operations import attend_latents
from gac.profiling.operators.base import Axes, Operand, Operator, joined
from gac.runtime.limits import LARGEST, latents, token_words

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gac.runtime.latents.quantise import QuantisedLatents

_ROPE_BASE = 1e4


class LatentAttention(Operator):
    """Keys are ``latent[k] @ B[group].T`` and rotated; values likewise, of v numbers; kv divides h, and g divides kv.

    FLOPs are those of making keys, of the scores, of mixing values as latents, and of making one value of the mixture.
    It takes two launches and needs a GPU. All sequences have the same positions. Latents have the numbers of the dtype,
    or so many ``bits``: these and their scales are random, and queries are scaled down, so that no token has all the
    weight.
    """

    axes = tuple(attend_latents(1, 1, 1, 1, 1, 1, 1, 1).axes)
    writes = ("b h d",)
    cublas = False

    def __init__(self, bits: int | None = None) -> None:
        self.bits = bits
        self.name = attend_latents(1, 1, 1, 1, 1, 1, 1, 1, bits).operator

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        b, h, kv, t, d, g, k, v = (axes[name] for name in self.axes)
        rows = kv // g * d
        widths = (g * rank if self.bits is None else token_words(g, rank, self.bits) for rank in (k, v))
        shapes = ((b, h, 1, d), *((b, t, width) for width in widths), (g, rows, k), (g, rows, v))
        return tuple(Operand(shape, dtype) for shape in shapes)

    def flops(self, axes: Axes) -> int:
        b, h, kv, t, d, _g, k, v = (axes[name] for name in self.axes)
        return 2 * b * (t * (kv * k * d + h * d + h * v) + h * v * d)

    def unmet(self, axes: Axes) -> str | None:
        if axes["h"] % axes["kv"]:
            return "kv that divides h"
        return "g that divides kv" if axes["kv"] % axes["g"] else None

    def refusal(self, axes: Axes, dtype: str) -> str | None:
        return latents(axes["d"], axes["k"], axes["v"])

    def operands(self, axes: Axes, dtype: str, cut: Callable[[Operand], "Tensor"]) -> Sequence["Tensor"]:
        if (reason := self.refusal(axes, dtype)) is not None:
            raise RuntimeError(reason)
        inputs = super().operands(axes, dtype, cut)
        _rotation(axes["d"], axes["t"], inputs[0].device)  # not while a launch is captured
        return inputs

    def run(self, inputs: Sequence["Tensor"], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        from torch import Tensor

        from gac.runtime.kernels.latent_attention.launch import Attention

        query, _, _, k_factor, v_factor = inputs
        (keys, k_scales), (values, v_scales) = (
            (latent, None) if isinstance(latent, Tensor) else (latent.numbers, latent.scales)
            for latent in self._latents(inputs)
        )
        rotation = _rotation(query.shape[-1], keys.shape[1], query.device)
        attention = Attention(
            query, keys, values, k_scales, v_scales, k_factor, None, v_factor, None, None, *rotation, None,
            self._scale(query),
        )  # fmt: skip
        return [attention.run()[:, 0]]

    def compare(self, inputs: Sequence["Tensor"], result: Sequence["Tensor"]) -> tuple["Tensor", "Tensor"]:
        from torch import Tensor

        query, _, _, k_factor, v_factor = inputs
        keys, values = (
            latent if isinstance(latent, Tensor) else latent.values(query.dtype) for latent in self._latents(inputs)
        )
        tensors, scale = (query, keys, values, k_factor, v_factor), self._scale(query)
        return joined([(result[0][row], _reference(tensors, row, scale)) for row in {0, len(query) - 1}])

    def _latents(self, inputs: Sequence["Tensor"]) -> Iterator["Tensor | QuantisedLatents"]:
        import torch

        from gac.runtime.latents.quantise import QuantisedLatents

        _, keys, values, *factors = inputs
        for words, (groups, _, rank) in zip((keys, values), (factor.shape for factor in factors), strict=True):
            bits = self.bits
            yield words if bits is None else QuantisedLatents(words.view(torch.int16), groups, rank, bits)

    def _scale(self, query: "Tensor") -> float:
        return 1 / (sqrt(query.shape[-1]) * (1 if self.bits is None else LARGEST[self.bits]))


@cache
def _rotation(size: int, tokens: int, device: "torch.device") -> tuple["Tensor", "Tensor", "Tensor"]:
    import torch

    from gac.runtime.kernels.latent_attention.layout import turns_of, with_runs

    pairs = size // 2
    frequencies = _ROPE_BASE ** -(torch.arange(pairs, dtype=torch.float32, device=device) / pairs)
    return frequencies, turns_of(frequencies, size), with_runs(torch.arange(tokens, device=device)[None])


def _reference(inputs: Sequence["Tensor"], row: int, scale: float) -> "Tensor":
    import torch

    from gac.runtime.kernels.elementwise.rows import plainly_rotated
    from gac.runtime.plain.modeling_gac import multiply_blocks

    query, latent_keys, latent_values, k_factor, v_factor = (tensor.float() for tensor in inputs)
    size, tokens = query.shape[-1], latent_keys.shape[1]
    frequencies, _, _ = _rotation(size, tokens, query.device)
    keys, values = (
        multiply_blocks(latents[row], factor, None).view(tokens, -1, size).transpose(0, 1)
        for latents, factor in ((latent_keys, k_factor), (latent_values, v_factor))
    )
    angles = (torch.arange(tokens, device=query.device)[:, None] * frequencies).repeat(1, 2)
    _, rotated = plainly_rotated(keys[None], keys[None], angles.cos()[None], angles.sin()[None])
    scores = query[row, :, 0].view(len(keys), -1, size) @ rotated[0].transpose(1, 2) * scale
    return (scores.softmax(-1) @ values).flatten(0, 1)


OPERATORS = (LatentAttention(), *map(LatentAttention, LARGEST))
