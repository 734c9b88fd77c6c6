"""Contracts of what can be brought from outside: each check runs a whole contract, and raises AssertionError.

    from gac.testing import check_method

    def test_mine() -> None:
        check_method(Mine())

No test framework is needed.
"""

from gac.testing.methods import check_method
from gac.testing.rules import check_rule

__all__ = ["check_method", "check_rule"]
