"""The rules of repair: the padded dim, and its cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from gac.core.arguments import Count, check_fields, checked
from gac.core.errors import GacError, did_you_mean
from gac_extensions.lab.operators.attention import FLASH_TEMPLATES

WITHIN = 1.01
"""Latencies are measured to 1 %, so dims within that are equally fast."""


@dataclass(frozen=True)
class ShapeContract:
    """Maps each dim to a padded one, which is never smaller.

    Attributes:
        strategy: name, one of ``STRATEGIES`` or your own.
        steps: a multiple of the last stays. Any other dim becomes the next multiple of the first, or if
            ``most_overhead`` forbids that of the second, and so on.
        dims: up to the largest of these, the next of them is taken instead.
        measured: take the fastest dim instead, among those of a latency table from this one on.
        most_overhead: maximum fraction by which a dim may grow, else it stays; None for any. With ``measured``, a
            second repair may grow a dim again.

    Raises:
        GacError: a size or the limit is invalid.
    """

    strategy: str
    steps: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()
    measured: bool = False
    most_overhead: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = (*self.steps, *self.dims)
        if not (self.steps or self.measured) or min(sizes, default=1) < 1 or list(self.dims) != sorted(self.dims):
            problem = f"a contract with steps {self.steps} and dims {self.dims}"
            raise GacError(problem, "a positive step at least, and dims that rise", "Correct them.")
        if self.most_overhead is not None and not self.most_overhead >= 0:
            problem = f"a maximum overhead of {self.most_overhead}"
            raise GacError(problem, "a fraction of at least 0, such as 0.1", "Correct the number.")

    @classmethod
    @checked
    def named(cls, strategy: str) -> "ShapeContract":
        """The contract of a strategy; raises GacError if it is unknown."""
        if strategy not in STRATEGIES:
            remedy = did_you_mean(strategy, STRATEGIES, "Correct the name.")
            raise GacError(f"strategy {strategy!r} is unknown", f"one of {', '.join(STRATEGIES)}", remedy)
        return STRATEGIES[strategy]

    @checked
    def becomes(self, dim: Count, most: int | None = None, latency: Mapping[int, int] = MappingProxyType({})) -> int:
        """The padded dim, ``most`` at most; the dim itself if every choice is too large.

        ``latency`` is ns by measured dim, if the contract is ``measured``.
        """
        room = min(inf if self.most_overhead is None else self.most_overhead * dim, inf if most is None else most - dim)
        if self.measured:
            choices = [size for size in latency if size >= dim]
        elif self.dims and dim <= self.dims[-1]:
            choices = [next(size for size in self.dims if size >= dim)]
        elif dim % self.steps[-1] == 0:
            choices = [dim]
        else:
            choices = [-(-dim // step) * step for step in self.steps]
        allowed = [size for size in choices if size - dim <= room]
        if not allowed:
            return dim
        if not self.measured:
            return allowed[0]
        fastest = min(latency[size] for size in allowed)
        return min(size for size in allowed if latency[size] <= WITHIN * fastest)


STRATEGIES: Mapping[str, ShapeContract] = MappingProxyType(
    {
        contract.strategy: contract
        for contract in (
            ShapeContract("minimal", steps=(8,)),
            ShapeContract("optimal", steps=(16,)),
            # FlashAttention-2's templates, and beyond them the coarsest alignment that latency tables tell apart.
            ShapeContract("predefined", steps=(64,), dims=FLASH_TEMPLATES),
            ShapeContract("tradeoff", steps=(32, 16, 8), most_overhead=0.1),
            ShapeContract("profile", measured=True),
        )
    }
)
