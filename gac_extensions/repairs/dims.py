"""Dims that several tensors share: where they are in the tensors, and which GEMMs they change."""

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gac.core.operations import Operation
from gac.forms import form_named
from gac.forms.base import Place
from gac.forms.tensors import Insertion, with_zeros
from gac.plan.plan import WeightChoice
from gac.profiling.operators import operation
from gac_extensions.repairs.weight_files import Source

Dims = Mapping[str, int]
"""The dim of every shared dim, by name."""
Insertions = Mapping[str, Sequence[Insertion]]
"""The zeros to insert into each tensor, by name; the axes of one tensor are independent."""


@dataclass(frozen=True)
class Run:
    """A GEMM, or a pair of GEMMs, with an axis of size ``rest`` + the sum of factor * dim over shared dims."""

    operator: str
    fixed: Mapping[str, int]  # the other axes, without the rows m
    axis: str
    factors: Mapping[str, int]  # by the name of the shared dim
    rest: int = 0

    def size(self, dims: Dims) -> int:
        return self.rest + sum(factor * dims[name] for name, factor in self.factors.items())

    def operation(self, dims: Dims, rows: int) -> Operation:
        return operation(self.operator, m=rows, **self.fixed, **{self.axis: self.size(dims)})


@dataclass(frozen=True)
class SharedDim:
    """One dim that the tensors of one weight or site share."""

    name: str  # of its owner: ``model.layers.0.self_attn.q_proj``
    dim: int
    places: tuple[Place, ...]  # zeros at their ends change no output
    runs: tuple[Run, ...] = ()  # its GEMMs; one that several dims share is listed with the first of them
    most: int | None = None  # the largest dim that the checkpoint's format allows; None: any
    stated: tuple[str | int, ...] = ()  # keys under which ``config.json`` states the dim; empty if it does not
    form: str | None = None  # GAC's form with this dim (the name is then that of the site); None: none describes it

    @property
    def fixed(self) -> bool:
        """True if it counts heads or blocks, which need no padding."""
        return self.form is not None and form_named(self.form).dim_counts_units


def stored_places(source: Source, choices: Iterable[WeightChoice], reason: str) -> tuple[Place, ...]:
    """The places of the weights' dims in the tensors.

    A CheckpointError says if a tensor is missing or has another length, and the ``reason`` to expect the right one.
    """
    places = [
        replace(place, tensor=f"{choice.name}.{place.tensor}")
        for choice in choices
        for place in form_named(choice.form).places(choice.weight, choice.dim)
    ]
    places = [place for place in places if place.tensor in source.tensors or not place.tensor.endswith(".bias")]
    for place in places:
        stored = source.tensors.get(place.tensor)
        if stored is None or stored.ndim <= place.axis or stored.shape[place.axis] != place.ends[-1]:
            state = "missing" if stored is None else f"of shape {tuple(stored.shape)}"
            expected = f"{place.ends[-1]} along axis {place.axis}, {reason}"
            raise source.contradiction(f"{place.tensor} is {state}", expected)
    return tuple(places)


def insertions(shared: Iterable[SharedDim], dims: Dims) -> Insertions:
    """The zeros that the new dims need; unchanged tensors have no entry."""
    zeros = defaultdict[str, list[Insertion]](list)
    for shared_dim in shared:
        if count := dims[shared_dim.name] - shared_dim.dim:
            for place in shared_dim.places:
                zeros[place.tensor] += (Insertion(place.axis, position, count) for position in place.ends)
    return dict(zeros)


def added_bytes(source: Source, shared: Iterable[SharedDim], dims: Dims) -> int:
    pairs = ((source.tensors[name].to("meta"), zeros) for name, zeros in insertions(shared, dims).items())
    return sum(with_zeros(tensor, zeros).nbytes - tensor.nbytes for tensor, zeros in pairs)


def with_dims(config: Mapping[str, Any], shared: Iterable[SharedDim], dims: Dims) -> dict[str, Any]:
    changed = copy.deepcopy(dict(config))
    for shared_dim in shared:
        if shared_dim.stated:
            *path, last = shared_dim.stated
            inner: Any = changed
            for key in path:
                inner = inner[key]
            inner[last] = dims[shared_dim.name]
    return changed
