"""Attention over latents in GAC's kernel, beside attention over the keys and values that they stand for."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import sqrt

import torch
from torch import Tensor

from gac.profiling.operators import Axes, Operand
from gac.profiling.operators.latent import LatentAttention
from gac.profiling.timing.runners import Runner, joined
from gac.runtime.kernels.elementwise.rows import plainly_rotated
from gac.runtime.kernels.latent_attention.launch import Attention
from gac.runtime.kernels.latent_attention.layout import turns_of, with_runs
from gac.runtime.latents.quantise import QuantisedLatents
from gac.runtime.limits import LARGEST
from gac.runtime.modules import multiply_blocks

_BASE = 1e4


class LatentAttentionRunner(Runner):
    """Two launches; it needs a GPU. Angles are those of one text for all.

    Of rounded latents the numbers and the scales are whatever the bits of random numbers say. Queries are multiplied by
    less there, so that no token has all the weight.
    """

    operator: LatentAttention
    devices = ("cuda",)

    def operands(self, axes: Axes, dtype: str, cut: Callable[[Operand], Tensor]) -> Sequence[Tensor]:
        if (reason := self.operator.refusal(axes, dtype)) is not None:
            raise RuntimeError(reason)
        inputs = super().operands(axes, dtype, cut)
        _angles(axes["d"], axes["t"], inputs[0].device)  # not while a launch is captured
        return inputs

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        query, _, _, k_factor, v_factor = inputs
        (keys, k_scales), (values, v_scales) = (
            (one, None) if isinstance(one, Tensor) else (one.numbers, one.scales) for one in self._latents(inputs)
        )
        angles = _angles(query.shape[-1], keys.shape[1], query.device)
        given = Attention(
            query, keys, values, k_scales, v_scales, k_factor, None, v_factor, None, None, *angles, None,
            self._scale(query),
        )  # fmt: skip
        return [given.run()[:, 0]]

    def compare(self, inputs: Sequence[Tensor], result: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        query, _, _, k_factor, v_factor = inputs
        keys, values = (one if isinstance(one, Tensor) else one.values(query.dtype) for one in self._latents(inputs))
        read = query, keys, values, k_factor, v_factor
        parts = [(result[0][text], _expected(read, text, self._scale(query))) for text in {0, len(query) - 1}]
        return joined(parts)

    def _latents(self, inputs: Sequence[Tensor]) -> Iterator[Tensor | QuantisedLatents]:
        """Keys and values."""
        _, keys, values, *factors = inputs
        for words, factor in zip((keys, values), factors, strict=True):
            bits, (groups, _, rank) = self.operator.bits, factor.shape
            yield words if bits is None else QuantisedLatents(words.view(torch.int16), groups, rank, bits)

    def _scale(self, query: Tensor) -> float:
        largest = 1 if self.operator.bits is None else LARGEST[self.operator.bits]
        return 1 / (sqrt(query.shape[-1]) * largest)


@cache
def _angles(size: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Frequencies, turns and positions."""
    pairs = size // 2
    frequencies = _BASE ** -(torch.arange(pairs, dtype=torch.float32, device=device) / pairs)
    return frequencies, turns_of(frequencies, size), with_runs(torch.arange(tokens, device=device)[None])


def _expected(inputs: Sequence[Tensor], text: int, scale: float) -> Tensor:
    """What the queries of a text mix, in float32: ``(heads, d)``."""
    query, keys, values, k_factor, v_factor = (one.float() for one in inputs)
    size, tokens = query.shape[-1], keys.shape[1]
    frequencies, _, _ = _angles(size, tokens, query.device)
    made_keys, made_values = (
        multiply_blocks(latents[text], factor, None).view(tokens, -1, size).transpose(0, 1)
        for latents, factor in ((keys, k_factor), (values, v_factor))
    )
    angles = (torch.arange(tokens, device=query.device)[:, None] * frequencies).repeat(1, 2)
    _, turned = plainly_rotated(made_keys[None], made_keys[None], angles.cos()[None], angles.sin()[None])
    asked = query[text, :, 0].view(len(made_keys), -1, size)
    scores: Tensor = asked @ turned[0].transpose(1, 2) * scale
    mixed: Tensor = scores.softmax(-1) @ made_values
    return mixed.flatten(0, 1)
