"""Linear weights of layers that have linear attention, or the like, in the place of attention."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from gac.models.sites import Weight

_GATED_DELTA = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")


@dataclass(frozen=True)
class Mixer:
    """The linear weights of such layers, all of one kind. Names are those in a layer."""

    kind: str  # in the config's ``layer_types``
    readers: tuple[str, ...]  # the weights that read the hidden states
    output: str  # the weight that writes to the residual stream
    keys: tuple[str, ...]  # of the config, from which the sizes follow
    sizes: Callable[..., tuple[int, ...]]  # outputs of each of the readers, and inputs of ``output``, from their values

    def weights(self, config: Any) -> Iterator[Weight]:
        """The weights in the order in which they run; the last one writes to the residual stream."""
        hidden, group = config.hidden_size, self.output.rpartition(".")[0]
        *outputs, inner = self.sizes(*self.values(config))
        reading = partial(Weight, in_features=hidden, input_group=group)
        for name, size in zip(self.readers, outputs, strict=True):
            yield reading(name, size)
        yield Weight(self.output, hidden, inner, to_residual=True)

    def values(self, config: Any) -> tuple[Any, ...]:
        return tuple(getattr(config, key) for key in self.keys)


def _qwen_sizes(key_heads: int, value_heads: int, key_length: int, value_length: int) -> tuple[int, ...]:
    keys, values = key_heads * key_length, value_heads * value_length
    return 2 * keys + values, values, value_heads, value_heads, values


GATED_DELTA_NET = Mixer(
    "linear_attention",
    tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")),
    "linear_attn.out_proj",
    _GATED_DELTA,
    _qwen_sizes,
)
"""Qwen 3.5's gated delta net (arXiv 2412.06464): queries, keys and values are one weight, ``z`` gates the output."""
