"""Contracts of what can be brought from outside: each check runs a whole contract, and raises AssertionError.

    from gac.testing import check_method

    def test_mine() -> None:
        check_method(Mine())

No test framework is needed.
"""

from gac.testing.forms import check_form
from gac.testing.methods import check_method
from gac.testing.rules import check_rule
from gac.testing.schemes import check_bits, check_scheme

__all__ = ["check_bits", "check_form", "check_method", "check_rule", "check_scheme"]
