"""Routed experts whose matrices lie in a storage, those of one kind one above the other."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gac.runtime.plain import modeling_gac
from gac.runtime.storage.base import Storage, Tensors
from gac.runtime.storage.modules import StoredStack


class StoredExperts(modeling_gac.StoredExperts):
    """Routed experts as transformers runs them, on values of the whole stack; inputs are not quantised."""

    kind = StoredStack

    def __init__(self, storage: Storage, dense: Any) -> None:
        super().__init__(storage, dense)
        for stack in self.children():
            assert isinstance(stack, StoredStack)
            stack.transposed = self.is_transposed


def joined(storage: Storage, experts: Sequence[Tensors], rows: int, columns: int) -> dict[str, Tensor]:
    """Return the tensors of matrices ``(rows, columns)`` one above the other; rows are a multiple of ``step``."""
    names = [name for name in experts[0] if name not in storage.metadata]
    tensors = {name: torch.cat([each[name] for each in experts]).contiguous() for name in names}
    return tensors | storage.metadata_for(len(experts) * rows, columns)


def rounded(storage: Storage, dense: Any, round_: Callable[[str, int, Tensor], Tensors]) -> StoredExperts:
    """Return experts whose matrices ``round_`` has rounded, by the name of the matrix and the expert's number.

    A ValueError says if experts would share a scale or a word, and names the rows that can be had.
    """
    stored = StoredExperts(storage, dense)
    for name, child in stored.named_children():
        values = dense.get_parameter(name).detach()
        matrices = values.mT.contiguous() if stored.is_transposed else values
        count, rows, columns = matrices.shape
        if rows % storage.step:
            raise ValueError(f"{name} has experts of {rows} rows in {storage}; expected a multiple of {storage.step}")
        tensors = [round_(name, expert, matrices[expert]) for expert in range(count)]
        assert isinstance(child, StoredStack)
        child.fill(joined(storage, tensors, rows, columns))
    return stored
