"""Dims that several tensors share: where they are in the tensors, and which GEMMs they change."""

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
"""The dim of every shared dim, by name."""
Insertions = Mapping[str, tuple[Insertion, ...]]
"""The zeros to insert into each tensor, by name; the axes of one tensor are independent."""


@dataclass(frozen=True)
class SharedDim:
    """One dim that the tensors of one weight or site share.

    Attributes:
        name: of its owner: ``model.layers.0.self_attn.q_proj``.
        places: where it is; zeros at its end change no output.
        most: the largest dim that the checkpoint's format allows; None: any.
        stated: keys under which ``config.json`` states the dim; empty if it does not.
        form: GAC's form with this dim (the name is then that of the site); None if no form describes it.
    """

    name: str
    dim: int
    places: tuple[Place, ...]
    most: int | None = None
    stated: tuple[str | int, ...] = ()
    form: str | None = None

    @property
    def fixed(self) -> bool:
        """True if it counts heads or blocks, which need no padding."""
        return self.form is not None and form_named(self.form).dim_counts_units


@dataclass(frozen=True)
class Run:
    """A GEMM, or a pair of GEMMs, with an axis of size ``rest`` + the sum of factor * dim over shared dims.

    Attributes:
        fixed: the other axes, without the rows m.
        moved: names of the shared dims, each with its factor.
    """

    operator: str
    fixed: tuple[tuple[str, int], ...]
    axis: str
    moved: tuple[tuple[str, int], ...]
    rest: int = 0

    def size(self, dims: Dims) -> int:
        return self.rest + sum(factor * dims[name] for name, factor in self.moved)

    def operation(self, dims: Dims, rows: int) -> Operation:
        """The operation for ``rows`` tokens."""
        return operation(self.operator, m=rows, **dict(self.fixed), **{self.axis: self.size(dims)})


def run_of(name: str, first: Operation, second: Operation) -> Run:
    """The run of one shared dim, from the operations for a single row at dim 1 and at dim 2."""
    axis = next(axis for axis, size in first.axes.items() if size != second.axes[axis])
    factor = second.axes[axis] - first.axes[axis]
    fixed = tuple((other, size) for other, size in first.axes.items() if other not in ("m", axis))
    return Run(first.operator, fixed, axis, ((name, factor),), first.axes[axis] - factor)


@dataclass(frozen=True)
class Block:
    """Shared dims that are padded at the same time, and their GEMMs."""

    shared: tuple[SharedDim, ...]
    runs: tuple[Run, ...]


def insertions(shared: Iterable[SharedDim], dims: Dims) -> Insertions:
    """The zeros that the new dims need; unchanged tensors have no entry."""
    zeros: dict[str, tuple[Insertion, ...]] = {}
    for shared_dim in shared:
        count = dims[shared_dim.name] - shared_dim.dim
        for place in shared_dim.places if count else ():
            more = tuple(Insertion(place.axis, position, count) for position in place.ends)
            zeros[place.tensor] = zeros.get(place.tensor, ()) + more
    return zeros


def added_bytes(source: Source, shared: Iterable[SharedDim], dims: Dims) -> int:
    pairs = ((source.tensors[name].to("meta"), zeros) for name, zeros in insertions(shared, dims).items())
    return sum(with_zeros(tensor, zeros).nbytes - tensor.nbytes for tensor, zeros in pairs)


def with_dims(config: Mapping[str, Any], shared: Iterable[SharedDim], dims: Dims) -> dict[str, Any]:
    """The config with the new dims that it states."""
    changed = copy.deepcopy(dict(config))
    for *path, last, dim in ((*entry.stated, dims[entry.name]) for entry in shared if entry.stated):
        inner: Any = changed
        for key in path:
            inner = inner[key]
        inner[last] = dim
    return changed
