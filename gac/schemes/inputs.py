"""What rounding a matrix is told of its inputs."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a matrix ``(rows, columns)`` is multiplied with. Several matrices and schemes can be told of the same.

    Attributes:
        moment: E[x x^T], shape ``(columns, columns)``.
        thorough: whether a scheme is to take its time. Where only the price of rounding is asked for it need not.
    """

    moment: Tensor
    thorough: bool = True
    _found: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, make: Callable[[Tensor], T]) -> T:
        """What a scheme finds of the moment, kept under a key of its own as long as the inputs are."""
        if key not in self._found:
            self._found[key] = make(self.moment)
        return cast(T, self._found[key])
