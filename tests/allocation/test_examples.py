import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["gac.allocation.knapsack.solve", "gac.plan.costs"])
def test_the_examples_in_docstrings(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted > 0
    assert results.failed == 0
