"""Small checkpoints that are split over two processes: every form and several schemes, and what cannot be divided."""

from collections.abc import Callable, Iterator
from typing import Any

from gac.models.families import family_of
from tests.compression.compressed import compressed
from tests.compression.stored import first_that_takes, stored
from tests.models.small import small_config, small_model, weights_of

MIXED = (("llama", "bf16"), ("llama", "w8a16"), ("gemma3_text", "w4a16:16"), ("qwen3", "w8a16"))
"""Families and schemes in which every form is."""
OTHERS = ("gpt_neox", "phi3")
"""With biases, and queries, keys and values in one weight; with gate and up in one."""
UNEVEN, INDIVISIBLE = "uneven", "indivisible"
FORMS: dict[int, tuple[tuple[str, int], ...]] = {
    0: (("latent:1", 16), ("low_rank", 16)),
    1: (("latent:2", 16), ("narrow", 128)),
    2: (("head_dim", 16), ("narrow_pair:128", 16)),
    3: (("heads", 1),),
    4: (("skip", 0),),
    5: (),
}
"""By layer, the forms that its weights have where they can, the first that takes one."""


def models(make_plan: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """All of them, by name."""
    for family, scheme in MIXED:
        yield f"{family}-{scheme}", _mixed(family, scheme, make_plan, fused=family == "llama")
    for family in OTHERS:
        yield family, _mixed(family, "bf16", make_plan)
    for name, first in ((UNEVEN, "narrow"), (INDIVISIBLE, "dense")):
        yield name, _of_three_heads(first, make_plan)


def _mixed(family: str, scheme: str, make_plan: Callable[..., Any], fused: bool = False) -> Any:
    config = small_config(family, num_hidden_layers=len(FORMS))
    setattr(config, family_of(config).neurons, 192)
    layers = ((weight, int(weight.name.split(".layers.")[1].split(".")[0])) for weight in weights_of(config))
    chosen = {weight.name: (*first_that_takes(weight, FORMS[layer]), scheme) for weight, layer in layers}
    return stored(small_model(config), make_plan, chosen, fused=fused)


def _of_three_heads(first: str, make_plan: Callable[..., Any]) -> Any:
    """Attentions of three heads, and MLPs of 99 neurons, or of 96 in the first layer."""
    config = small_config("llama", hidden_size=96, num_attention_heads=3, num_key_value_heads=3, vocab_size=259)
    config.intermediate_size = 99
    mlp = (f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down"))
    changes = dict.fromkeys(mlp, ("narrow", 96)) if first == "narrow" else {}
    return compressed(small_model(config), make_plan, changes)
