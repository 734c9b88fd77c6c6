"""Attention over latents in GAC's kernel, beside attention over the keys and values that they stand for."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from gac.profiling.operators import Axes, Operand
from gac.profiling.timing.runners import Runner, joined
from gac.runtime.latent_attention import TILE, Attention
from gac.runtime.modules import multiply_blocks
from gac.runtime.rows import plainly_rotated

_BASE = 1e4


class LatentAttentionRunner(Runner):
    """Two launches; it needs a GPU. Angles are those of one text for all."""

    devices = ("cuda",)

    def operands(self, axes: Axes, dtype: str, cut: Callable[[Operand], Tensor]) -> Sequence[Tensor]:
        if (reason := self.operator.refusal(axes, dtype)) is not None:
            raise RuntimeError(reason)
        inputs = super().operands(axes, dtype, cut)
        _angles(axes["d"], axes["t"], inputs[0].device)  # not while a launch is captured
        return inputs

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        query, keys, values, k_factor, v_factor = inputs
        angles = _angles(query.shape[-1], keys.shape[1], query.device)
        scale = query.shape[-1] ** -0.5
        given = Attention(query, keys, values, k_factor, None, v_factor, None, None, *angles, None, scale)
        return [given.run()[:, 0]]

    def compare(self, inputs: Sequence[Tensor], result: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        parts = [(result[0][text], _expected(inputs, text)) for text in {0, len(inputs[0]) - 1}]
        return joined(parts)


@cache
def _angles(size: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Frequencies, turns and the last position."""
    pairs = size // 2
    frequencies = _BASE ** -(torch.arange(pairs, device=device) / pairs)
    angles = torch.arange(TILE + 1, device=device)[:, None] * frequencies
    turns = torch.stack((angles.cos(), angles.sin()), dim=1)
    return frequencies, turns, torch.full((1, 1), tokens - 1, device=device)


def _expected(inputs: Sequence[Tensor], text: int) -> Tensor:
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
    scores: Tensor = asked @ turned[0].transpose(1, 2) * size**-0.5
    mixed: Tensor = scores.softmax(-1) @ made_values
    return mixed.flatten(0, 1)
