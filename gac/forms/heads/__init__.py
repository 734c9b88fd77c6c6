"""Attention with fewer heads."""

from dataclasses import replace

from gac.forms.base import LossMeasure, Place, Shorter
from gac.models.sites import Side, Weight


class HeadGroups(Shorter):
    """Attention with some of its key-value heads, each with the query heads that read it: q, k, v and o are smaller.

    So is the KV cache. Heads keep their length. Attentions whose norms pass over all heads, or that write queries, keys
    and values with one weight, have none to drop.
    """

    name = "heads"
    symbol = "h"
    meaning = "key-value heads that an attention keeps"
    loss = LossMeasure(needs_forward_runs=True)
    dim_counts_units = True
    removes = ("heads",)

    def shortens(self, weight: Weight) -> Side | None:
        if weight.groups < 2:
            return None
        return "in" if weight.values == "in" else "out"

    def full(self, weight: Weight) -> int:
        return weight.groups

    def size(self, weight: Weight, dim: int) -> int:
        return dim * (super().full(weight) // weight.groups)

    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        ends, unit = (self.size(weight, dim),), self.size(weight, 1)
        return tuple(replace(place, ends=ends, unit=unit) for place in super().places(weight, dim))
