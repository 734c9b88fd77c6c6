"""A low-rank pair for each group of heads of one weight (PaLU, arXiv 2407.21118, section 3.2)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gac.curves import LossCurve
from gac.sensitivity.methods import Decomposition, Metric, decompose


@dataclass(frozen=True, eq=False)
class GroupedDecomposition:
    """Every rank at once, the same for all groups of the weight.

    Attributes:
        groups: the decomposition of each group's rows.
        curve: what each rank loses in all groups together.
    """

    groups: Sequence[Decomposition]
    curve: LossCurve

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """``(second (groups, rows, rank), first (groups * rank, in))``; group g reads rows g * rank on of ``first``."""
        pairs = [group.factors(rank) for group in self.groups]
        return torch.stack([second for second, _ in pairs]), torch.cat([first for _, first in pairs])


def decompose_groups(weight: Tensor, metric: Metric, groups: int) -> GroupedDecomposition:
    """Truncate each group's rows of a weight ``(out, in)`` by themselves, in their part of the metric.

    An error of two groups is taken for the sum of their errors: gradients that they share count as independent.

    Args:
        groups: how many; each has ``out / groups`` neighbouring rows.

    Raises:
        ModelError: a statistic or the weight is not finite.
    """
    rows = weight.shape[0] // groups
    parts = [slice(start, start + rows) for start in range(0, groups * rows, rows)]
    found = [decompose(weight[part], Metric(metric.inputs, metric.gradients[part, part])) for part in parts]
    return GroupedDecomposition(found, LossCurve(np.sum([group.curve.loss for group in found], axis=0)))
