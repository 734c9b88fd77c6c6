"""A weight of a narrower MLP as two factors."""

import re
from dataclasses import replace

from gac.core.errors import PlanError
from gac.forms.base import Form, LossMeasure
from gac.forms.low_rank import LowRank
from gac.forms.narrow import Narrow
from gac.models.sites import Weight

_WIDTH = re.compile(r"[1-9][0-9]{0,8}")
NARROW = Narrow()
_EIGHTHS = (6, 5, 4, 3, 2)
_STEP = 64


def widths(neurons: int) -> tuple[int, ...]:
    """The widths at which pairs are measured, the widest first: 6/8 to 2/8 of the neurons.

    They are multiples of 64, or of the largest power of two that an eighth of fewer neurons holds. On SmolLM2 7/8 was
    never chosen, and three times as many widths win next to nothing more.

    >>> widths(1536), widths(24)
    ((1152, 960, 768, 576, 384), (18, 14, 12, 8, 6))
    """
    step = min(_STEP, 1 << max(0, (neurons // 8).bit_length() - 1))
    grid = dict.fromkeys(neurons * eighths // 8 // step * step for eighths in _EIGHTHS)
    return tuple(width for width in grid if 0 < width < neurons)


class NarrowPair(LowRank):
    """gate, up or down of an MLP with fewer neurons as W ~ B A, where W is the weight as ``narrow`` leaves it.

    The other weights of the MLP are narrow to the same width, or pairs at it too. The name says the width, the dim is
    the rank: ``narrow_pair:1024`` of gate has B ``(1024, rank)`` and A ``(rank, in)``. Without a width it stands for
    those of the grid (``widths``), and no weight has it.

    Args:
        width: neurons of the MLP; None: any of the grid.
    """

    symbol = "p"
    served = True
    meaning = "rank of a pair / neurons of its MLP"
    loss = LossMeasure()
    rule_resource = None
    parent_form_name = NARROW.name

    def __init__(self, width: int | None = None) -> None:
        self.width = width
        self.name = "narrow_pair" if width is None else f"narrow_pair:{width}"

    def with_parameter(self, text: str) -> "NarrowPair":
        """The form for MLPs with as many neurons as the text says; PlanError if it is no such number."""
        if not _WIDTH.fullmatch(text):
            expected = "narrow_pair:N with a number of neurons of 1 or more"
            raise PlanError(f"form narrow_pair:{text}", expected, "Correct the name.")
        return NarrowPair(int(text))

    def applies_to(self, weight: Weight) -> bool:
        return NARROW.applies_to(weight) and (self.width or 1) < NARROW.full(weight)

    def variants(self, weight: Weight) -> tuple[Form, ...]:
        if not self.applies_to(weight):
            return ()
        return (self,) if self.width else tuple(map(NarrowPair, widths(NARROW.full(weight))))

    def label(self, dim: int) -> str:
        return f"{super().label(dim)}/{self.width}"

    def shortening(self, dim: int) -> tuple[Form, int]:
        if self.width is None:
            remedy = "Say how many neurons the MLP has."
            raise PlanError("form narrow_pair of a weight", "narrow_pair:N with a number of neurons", remedy)
        return NARROW, self.width

    def truncated(self, weight: Weight) -> Weight:
        """The weight as ``narrow`` leaves it."""
        narrow, width = self.shortening(1)
        size = narrow.size(weight, width)
        if narrow.shortens(weight) == "out":
            return replace(weight, out_features=size)
        return replace(weight, in_features=size)

    def max_useful_dim(self, weight: Weight) -> int:
        return super().max_useful_dim(self.truncated(weight))
