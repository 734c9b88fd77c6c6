"""Layers from whose caches tokens can be taken, and the shapes of attention over the rest, from a config alone."""

from collections.abc import Iterable, Sequence
from typing import Any

from gac.core.errors import ModelError, ProfileError
from gac.core.workloads import Workload
from gac.models.attentions import heads_of, sliding_layers
from gac.models.families import Family, family_of, text_config
from gac.models.shapes import shapes_of
from gac.plan.costs import floored
from gac.profiling.records import Point
from gac.profiling.sweeps.coverage import check_dtype


def finds_attentions(family: Family) -> bool:
    """Return True if kvpress finds the attentions: in all layers of ``model.layers``, with rotary embedding."""
    return family.layers == "model.layers" and family.is_plain


def window_of(config: Any) -> int | None:
    """The most tokens that those layers cache; None: there are no such layers, or no limit in the config."""
    return getattr(config, "sliding_window", None) if sliding_layers(config) else None


def cut_layers(config: Any) -> list[int]:
    """The layers from whose caches tokens can be taken: all that are not of a sliding window; a ModelError if none."""
    sliding = sliding_layers(config)
    layers = [layer for layer in range(config.num_hidden_layers) if layer not in sliding]
    if not layers:
        raise ModelError(
            f"a {config.model_type} whose layers all attend within a sliding window",
            "a layer that attends to the whole context",
            "Keep all tokens: such a cache does not grow beyond the window.",
        )
    return layers


def not_pressed(model_type: str) -> ModelError:
    return ModelError(
        f"a {model_type}, in which kvpress finds no attention with rotary embedding",
        "an architecture like Llama, Mistral, Phi-3, Qwen or Gemma-3",
        "Keep all tokens of this one.",
    )


def token_points(
    model: Any, workloads: Sequence[Workload], shares: Iterable[float], step: int, dtype: str = "bf16"
) -> tuple[Point, ...]:
    """List the points that a plan of tokens looks up: attention over shares of the context of each decode workload.

    Numbers of tokens are rounded down to a multiple of ``step``. The context and the sliding window are measured too.
    ProfileError where no workload decodes.
    """
    check_dtype(dtype)
    config = text_config(shapes_of(model))
    family_of(config)
    decoding = [workload for workload in workloads if workload.phase == "decode"]
    if not decoding:
        raise ProfileError("attention over tokens kept without a workload that decodes", "decode:B@C", "Name one.")
    heads, window, points = heads_of(config), window_of(config), list[Point]()
    for workload in decoding:
        context = workload.tokens
        shortened = (floored(share, context) // step * step for share in shares)
        lengths = {*shortened, context, min(context, window or context)} - {0}
        points += [Point(heads.over(workload.batch, tokens), dtype) for tokens in sorted(lengths)]
    return tuple(dict.fromkeys(points))
