"""The importance objective: scores times parameters, over the ranks near those that another rule gave."""

from collections.abc import Mapping, Sequence

import numpy as np

from gac.allocation.knapsack import Group, knapsack
from gac.allocation.weight_rules import Chosen
from gac.core.arrays import Ints
from gac.forms import DENSE, form_named
from gac.models.sites import Weight

WINDOW = 64
"""How far from the unaligned rank a candidate may lie, either way."""


def most_important(
    weights: Sequence[Weight],
    scores: Mapping[str, float],
    start: Mapping[str, Chosen],
    ranks: Mapping[str, Ints],
    limit: int,
    window: int = WINDOW,
) -> dict[str, Chosen]:
    """The exact optimum of the importance objective, over the ranks in a window round the unaligned ones.

    Published is: maximise ``sum_i s_i (|W_i| - |W_i*|)`` within the budget, where ``|W_i|`` counts the parameters of a
    candidate, ``|W_i*|`` those at the unaligned rank and ``s_i`` scores the weight. ``|W_i*|`` is a constant, so the
    same choice minimises ``sum_i s_i (max |W_i| - |W_i|)``, whose terms are 0 or more.

    The objective is linear in the parameters: a weight that scores above the exchange rate of the budget goes to the
    top of its window and any other to the bottom, so that the window decides and not the loss.

    Args:
        scores: by weight name, 0 or more.
        start: the unaligned form and dim of each weight; one that is dense there stays dense.
        ranks: what each weight may take; without any in its window it takes the nearest, without any at all it stays
            dense.
        limit: most parameters of all weights together.

    Raises:
        BudgetError: the smallest candidates take more than the limit.
    """
    choices = [_near(weight, start[weight.name], ranks[weight.name], window) for weight in weights]
    groups = []
    for weight, near in zip(weights, choices, strict=True):
        params = np.array([form_named(one.form).params(weight, one.dim) for one in near], dtype=np.int64)
        short = (params.max() - params).astype(np.float64)
        groups.append(Group(weight.name, scores[weight.name] * short, params[:, None]))
    picked = knapsack(groups, [limit], names=["the parameter limit"]).choice
    return {weight.name: near[item] for weight, near, item in zip(weights, choices, picked, strict=True)}


def _near(weight: Weight, start: Chosen, ranks: Ints, window: int) -> list[Chosen]:
    if start.form == DENSE.name or len(ranks) == 0:
        full = DENSE.full(weight)
        return [Chosen(DENSE.name, full, full)]
    distance = np.abs(ranks - start.dim)
    near = ranks[distance <= max(window, int(distance.min()))]
    return [Chosen(start.form, rank, rank) for rank in near.tolist()]
