"""Exact multi-choice knapsack: one item a group, least loss within every limit, with a proof.

The steps, each in a module:

1. ``instance``: flat arrays whose sums fit int64, with lowest costs subtracted and common divisors out.
2. ``solve``: losses as integers, as fine as the optimum needs. Where no choice is known, the limits are minimised one
   after the other, which finds a choice or proves that there is none.
3. ``relaxation``: Lagrange multipliers of the linear relaxation, and lower bounds that are exact in these integers.
4. ``search``: items that the bound does not rule out, in margins that widen until the optimum is settled.
5. ``lists``: meet in the middle (Horowitz, Sahni 1974): two lists of partial choices, without dominated ones.
"""

from gac.allocation.knapsack.instance import Group, Solution
from gac.allocation.knapsack.solve import knapsack

__all__ = ["Group", "Solution", "knapsack"]
