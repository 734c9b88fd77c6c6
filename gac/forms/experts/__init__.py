"""Fewer routed experts in a layer, and narrower ones."""

import re

from gac.core.errors import PlanError
from gac.forms.base import Form, LossMeasure, ModuleSpec, Place, Shorter
from gac.models.sites import Side, Weight

_WIDTH = re.compile(r"[1-9][0-9]{0,8}")
_UNIT, _PARTS, _MOST, _LEAST = 64, 12, 7, 0.375
_PAIR = 2  # experts by whose scores a router judges a group


def widths(neurons: int) -> tuple[int, ...]:
    """The widths below that of the experts, the widest first, at most 7 and none below 3/8.

    They are multiples of 64, as grouped GEMMs like them, or of the largest power of two that an eighth of fewer neurons
    holds; of wide experts multiples of 128, 256, ...

    >>> widths(768), widths(1408)
    ((704, 640, 576, 512, 448, 384, 320), (1280, 1152, 1024, 896, 768, 640))
    """
    step = min(_UNIT, 1 << max(0, (neurons // 8).bit_length() - 1))
    while step * _PARTS < neurons:
        step *= 2
    grid = range((neurons - 1) // step * step, 0, -step)
    return tuple(width for width in grid if width >= _LEAST * neurons)[:_MOST]


class Experts(Shorter):
    """A mixture of experts keeps some of the experts of a layer, and the rows of its router that choose them.

    A token takes as many as before: where one of its experts is gone, the router takes the next one, and weighs them as
    the model does. At most as many can go as leave each token that number. Of groups of experts each loses as many, so
    that the router still finds equal ones. ``experts:576`` keeps 576 neurons of each
    expert that stays; a weight may have this where ``experts`` is asked for. Schemes with a storage hold experts,
    however many stay; the router keeps 16 bits.

    Args:
        width: neurons of each expert; None: as many as before.
    """

    symbol = "e"
    meaning = "experts that a layer keeps / neurons of each"
    loss = LossMeasure(uses_routed_tokens=True)
    served = True
    dim_counts_units = True

    def __init__(self, width: int | None = None) -> None:
        self.width = width
        self.name = "experts" if width is None else f"experts:{width}"

    @property
    def base_form(self) -> "Experts | None":
        return None if self.width is None else Experts()

    def with_parameter(self, text: str) -> "Experts":
        """The form with experts of as many neurons as the text says; PlanError if it is no such number."""
        if not _WIDTH.fullmatch(text):
            problem, expected = f"form experts:{text}", "experts:N with a number of neurons of 1 or more"
            raise PlanError(problem, expected, "Correct the name.")
        return Experts(int(text))

    def applies_to(self, weight: Weight) -> bool:
        return weight.is_routed and (self.width is None or not weight.experts or self.width < weight.expert_width)

    def variants(self, weight: Weight) -> tuple[Form, ...]:
        if self.width or not weight.experts:
            return (self,) if self.applies_to(weight) else ()
        return (self, *map(Experts, widths(weight.expert_width)))

    def shortens(self, weight: Weight) -> Side | None:
        if not weight.is_routed:
            return None
        return "in" if weight.experts else "out"

    def full(self, weight: Weight) -> int:
        return weight.experts or weight.out_features

    def least(self, weight: Weight) -> int:
        if not weight.expert_groups:
            return weight.top_k
        of_group = max(_PAIR, -(-weight.top_k // weight.chosen_groups))
        return min(weight.expert_groups * of_group, self.full(weight))

    def multiple(self, weight: Weight) -> int:
        return weight.expert_groups or 1

    def routed_sizes(self, weight: Weight, dim: int) -> tuple[int, int]:
        return dim, self.width or weight.expert_width

    def sides(self, weight: Weight, dim: int) -> tuple[int, int]:
        matrices = weight.blocks * self.routed_sizes(weight, dim)[1] if weight.experts else 1
        return weight.in_features, dim * matrices

    def size(self, weight: Weight, dim: int) -> int:
        return dim * weight.in_features  # whole matrices, whose sides stay aligned

    def label(self, dim: int) -> str:
        return super().label(dim) if self.width is None else f"{super().label(dim)}/{self.width}"

    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        if not weight.experts:
            return ModuleSpec("Router", {"experts": dim})
        return super().module(weight, dim)

    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        return ()
