"""Attention of one new token over a cache of latents, in GAC's own kernel."""

from gac.core.operations import attend_latents
from gac.profiling.operators.base import Axes, Operand, Operator
from gac.runtime.limits import latents, token_words


class LatentAttention(Operator):
    """Keys are ``latent[k] @ B[group].T`` and rotated; values likewise, of v numbers; kv divides h, and g divides kv.

    FLOPs are those of making keys, of the scores, of mixing values as latents, and of making one value of the mixture.

    Args:
        bits: of latents that are rounded, both of keys and of values; None: they have the numbers of the dtype.
    """

    axes = tuple(attend_latents(1, 1, 1, 1, 1, 1, 1, 1).axes)
    writes = ("b h d",)
    runner = "gac.profiling.timing.runners.latent:LatentAttentionRunner"

    def __init__(self, bits: int | None = None) -> None:
        self.bits = bits
        self.name = attend_latents(1, 1, 1, 1, 1, 1, 1, 1, bits).operator

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        b, h, kv, t, d, g, k, v = (axes[name] for name in self.axes)
        rows = kv // g * d
        held = (g * rank if self.bits is None else token_words(g, rank, self.bits) for rank in (k, v))
        shapes = ((b, h, 1, d), *((b, t, words) for words in held), (g, rows, k), (g, rows, v))
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
