"""Routed experts whose matrices lie in a storage, those of one kind one above the other."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from gac.runtime.storage.base import Storage, Tensors
from gac.runtime.storage.modules import Stored

MATRICES = ("gate_up_proj", "up_proj", "down_proj")


class StoredStack(Stored):
    """Matrices ``(experts, out, in)`` in a storage."""

    def __init__(self, storage: Storage, dense: Tensor, transposed: bool) -> None:
        super().__init__(tuple((dense.mT if transposed else dense).shape), storage, device=dense.device)


class StoredExperts(nn.Module):
    """Routed experts as transformers runs them, on values of the whole stack; inputs are not quantised."""

    def __init__(self, storage: Storage, dense: Any) -> None:
        super().__init__()
        self._plain = (copy(dense),)  # no submodule
        self.num_experts, self.is_transposed = dense.num_experts, getattr(dense, "is_transposed", False)
        for name, values in dense.named_parameters(recurse=False):
            stored = StoredStack(storage, values, self.is_transposed) if name in MATRICES else None
            if stored is None:
                self.register_parameter(name, values)
            else:
                self.add_module(name, stored)
        vars(self._plain[0])["_parameters"] = {}
        self.train(dense.training)

    def forward(self, hidden_states: Tensor, *routing: Any, **options: Any) -> Any:
        experts = copy(self._plain[0])
        values = {name: stack.values(hidden_states.dtype) for name, stack in self.named_children()}
        if self.is_transposed:
            values = {name: each.mT.contiguous() for name, each in values.items()}
        vars(experts)["_parameters"] = {**self._parameters, **values}
        return experts(hidden_states, *routing, **options)


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
