"""Sites: places in a model that one choice governs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gac.models.weights import Side, Weight


class Shortens(Protocol):
    """A form, as far as sites know of it."""

    def shortens(self, weight: Weight) -> Side | None:
        """The side of the weight that it shortens; None: neither."""


@dataclass(frozen=True)
class Site:
    """A place in the model that one choice governs.

    Attributes:
        name: dotted module name (``model.layers.0.mlp``, ``model.layers.0.self_attn.q_proj``).
        layer: index of the decoder layer.
        kind: what it is in the family's words (``q_proj``, ..., ``mlp``); the same in every layer.
        weights: the linear weights it governs; ``narrow`` and ``head_dim`` take several of them at once.
        fused: positions of the first weights, whose first GEMMs run as one; empty where each runs by itself.
        either: whether they may run by themselves as well, so that this is chosen too.
    """

    name: str
    layer: int
    kind: str
    weights: tuple[Weight, ...]
    fused: tuple[int, ...] = ()
    either: bool = False

    @property
    def layouts(self) -> "tuple[Site, ...]":
        """The ways in which it may run: itself, or apart (the first) and fused."""
        return (self.run(shared=False), self.run(shared=True)) if self.either else (self,)

    def run(self, shared: bool) -> "Site":
        """The site where it is chosen whether its weights share a GEMM."""
        return replace(self, fused=self.fused if shared else (), either=False)

    @property
    def params(self) -> int:
        return sum(weight.params for weight in self.weights)

    def taken_by(self, form: Shortens) -> tuple[int, ...]:
        """Positions of the weights that a form shortens together; empty where it finds no two sides that meet."""
        found = tuple(at for at, weight in enumerate(self.weights) if form.shortens(weight))
        sides = {form.shortens(self.weights[at]) for at in found}
        return found if sides == {"out", "in"} else ()


def short_names(names: Sequence[str]) -> dict[str, str]:
    """What to call the weights of one layer: the last part of a name, after the part before it where two end alike."""
    parts = {name: name.split(".") for name in names}
    ends = Counter(found[-1] for found in parts.values())
    return {name: ".".join(found[-2:] if ends[found[-1]] > 1 else found[-1:]) for name, found in parts.items()}
