"""Exact multi-choice knapsack: one item a group, least loss within every limit, with a proof.

The steps, each a module: flat arrays whose sums fit int64, with cheapest costs subtracted and common divisors out
(``instance``); losses as integers, as fine as the optimum needs (``refine``); Lagrange multipliers of the linear
relaxation, and a bound that is exact in these integers (``relaxation``); the items that the bound does not rule out,
searched with lists of partial choices (``growth``, under several limits ``halves``), less what is bound to leave too
much of the limits unused (``outlook``), that are joined in the middle (``join``), in margins that widen until the
optimum is settled (``search``). Where no choice is at hand, one limit after the other is minimised the same way, which
finds one or proves that there is none (``feasibility``).
"""

from gac.allocation.knapsack.groups import Group, Solution
from gac.allocation.knapsack.solve import knapsack

__all__ = ["Group", "Solution", "knapsack"]
