"""Where a dim lies in a checkpoint's tensors, and which GEMMs it moves."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gac.core.operations import Operation
from gac.forms import form_named
from gac.forms.base import Place
from gac.forms.tensors import Insertion, with_zeros
from gac.profiling.operators import operation
from gac.repairs.weight_files import Source

Dims = Mapping[str, int]
"""A dim for every shared dim, by name."""


@dataclass(frozen=True)
class SharedDim:
    """One dim that several tensors share: what one writes, the next reads.

    Attributes:
        name: whose it is, as in ``model.layers.0.self_attn.q_proj``.
        places: where it lies; zeros at the end of it change no output.
        most: the largest dim that the checkpoint's format allows; None: any.
        stated: the keys under which ``config.json`` states the dim; empty where it does not.
        form: the form of GAC whose dim it is, with the name of the site that has it; None where no form can say it.
    """

    name: str
    dim: int
    places: tuple[Place, ...]
    most: int | None = None
    stated: tuple[str | int, ...] = ()
    form: str | None = None

    @property
    def carried(self) -> bool:
        """Whether it stays as it is: it counts heads or blocks, whose features are many and aligned."""
        return self.form is not None and form_named(self.form).dim_counts_units


@dataclass(frozen=True)
class Run:
    """A GEMM, or a pair of them. Shared dims move one of its axes, whose size is ``rest`` + the sum of times * dim.

    Attributes:
        fixed: the other axes, without the rows m.
        moved: names of the shared dims, each with how often its dim counts.
    """

    operator: str
    fixed: tuple[tuple[str, int], ...]
    axis: str
    moved: tuple[tuple[str, int], ...]
    rest: int = 0

    def size(self, dims: Dims) -> int:
        return self.rest + sum(times * dims[name] for name, times in self.moved)

    def operation(self, dims: Dims, rows: int) -> Operation:
        """What runs for ``rows`` tokens."""
        return operation(self.operator, m=rows, **dict(self.fixed), **{self.axis: self.size(dims)})

    def only(self, name: str) -> bool:
        """Whether no other shared dim moves it."""
        return [shared_dim for shared_dim, _ in self.moved] == [name]


def run_of(name: str, one: Operation, two: Operation) -> Run:
    """The run of one shared dim, from the operations for a single row at dim 1 and at dim 2."""
    axis = next(axis for axis, size in one.axes.items() if size != two.axes[axis])
    times = two.axes[axis] - one.axes[axis]
    fixed = tuple((other, size) for other, size in one.axes.items() if other not in ("m", axis))
    return Run(one.operator, fixed, axis, ((name, times),), one.axes[axis] - times)


@dataclass(frozen=True)
class Block:
    """Shared dims that are repaired together, and what runs there."""

    shared: tuple[SharedDim, ...]
    runs: tuple[Run, ...]


Insertions = Mapping[str, tuple[Insertion, ...]]
"""What goes into each tensor, by name; the axes of one tensor do not depend on each other."""


def insertions(shared: Iterable[SharedDim], dims: Dims) -> Insertions:
    """What the new dims put in; tensors that stay as they are have no entry."""
    found: dict[str, tuple[Insertion, ...]] = {}
    for shared_dim in shared:
        count = dims[shared_dim.name] - shared_dim.dim
        for place in shared_dim.places if count else ():
            more = tuple(Insertion(place.axis, position, count) for position in place.ends)
            found[place.tensor] = found.get(place.tensor, ()) + more
    return found


def added_bytes(source: Source, shared: Iterable[SharedDim], dims: Dims) -> int:
    """By how many bytes the tensors of these shared dims grow."""
    found = ((source.tensors[name].to("meta"), more) for name, more in insertions(shared, dims).items())
    return sum(with_zeros(tensor, more).nbytes - tensor.nbytes for tensor, more in found)


def with_dims(config: Mapping[str, Any], shared: Iterable[SharedDim], dims: Dims) -> dict[str, Any]:
    """A config with the dims that it states."""
    found = copy.deepcopy(dict(config))
    for *path, last, dim in ((*one.stated, dims[one.name]) for one in shared if one.stated):
        inner: Any = found
        for key in path:
            inner = inner[key]
        inner[last] = dim
    return found
