"""Inputs of a matrix, for its quantisation."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Inputs:
    """Statistics of the inputs of a matrix ``(rows, columns)``, shared by several matrices and schemes.

    Attributes:
        moment: E[x x^T], shape ``(columns, columns)``.
        thorough: optimise the result; a price alone does not need it.
    """

    moment: Tensor
    thorough: bool = True
    _results: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, make: Callable[[Tensor], T]) -> T:
        """A function of the moment, computed once per key."""
        if key not in self._results:
            self._results[key] = make(self.moment)
        return cast(T, self._results[key])
