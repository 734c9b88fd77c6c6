"""How every operator runs with PyTorch: the runner that its description in ``gac.profiling.operators`` names."""

from functools import cache
from importlib import import_module

from gac.profiling.operators import OPERATORS
from gac.profiling.timing.runners.base import WORST_ERROR, Result, Runner, relative_error

__all__ = ["WORST_ERROR", "Result", "Runner", "relative_error", "runner_of"]


@cache
def runner_of(name: str) -> Runner:
    """The runner of an operator.

    Raises:
        ProfileError: there is no operator of this name.
    """
    operator = OPERATORS.get(name)
    module, _, runner = operator.runner.partition(":")
    made: Runner = getattr(import_module(module), runner)(operator)
    return made
