"""Where the tensors of a GGUF file come from: the numbers of a compressed model, under the stock model's names."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gac.checkpoint.export import unchanged_state, weight_state
from gac.plan.plan import Plan, WeightChoice
from gac.runtime.storage.embeddings import embeddings_of
from gac.runtime.storage.modules import Stored
from gac.schemes import DEFAULT_SCHEME, scheme_named
from gac.schemes.scaled import Scaled


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor of the stock model.

    Attributes:
        name: in the stock model.
        shape: likewise.
        dtype: the model's.
        scheme: of the plan; ``bf16`` for what is not rounded.
        plain: the values in the model's dtype, or where they are.
        stored: what holds them rounded; None where nothing does.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    scheme: str
    plain: Tensor | partial[Tensor]
    stored: Stored | None = None

    def values(self) -> Tensor:
        """In the model's dtype."""
        return self.plain if isinstance(self.plain, Tensor) else self.plain()

    def exact(self) -> Tensor:
        """What is stored, before any cast to the model's dtype: in float32; else the values."""
        return self.values() if self.stored is None else self.stored.values(torch.float32)

    def scaled(self) -> Scaled | None:
        """The same as whole numbers and scales; None where they are no such."""
        if self.stored is None:
            return None
        return scheme_named(self.scheme).scaled(self.exact().view(self.stored.matrix), self.stored.tensors)


def sources(model: Any, stock: Any, plan: Plan, merge: bool) -> Iterator[Source]:
    """Every tensor of the stock model, in its order; a head that is the embedding is left out.

    Args:
        stock: as ``gac.checkpoint.export.stock_model`` gives it.
        merge: as for ``gac.export``. What is merged is stored no longer.
    """
    same, changed = unchanged_state(model, plan), {one.name: one for one in plan.weights if one.changed}
    head = plan.measured.head.scheme if plan.measured.head else DEFAULT_SCHEME
    held = {name: (head, one) for name, one in embeddings_of(model).items() if isinstance(one, Stored)}
    for one in changed.values():
        if isinstance(module := model.get_submodule(one.name), Stored):
            held[one.name] = one.scheme, module
    for name, empty in stock.state_dict().items():
        if name == _HEAD and stock.config.tie_word_embeddings:
            continue
        owner, _, kind = name.rpartition(".")
        shape, choice = tuple(empty.shape), changed.get(owner)
        plain = same[name] if choice is None else partial(_one_of, model, stock, choice, merge, name)
        scheme, stored = held.get(owner, (DEFAULT_SCHEME, None))
        if stored is None or kind != "weight" or stored.shape != shape:  # a bias, or what is merged
            scheme, stored = DEFAULT_SCHEME, None
        yield Source(name, shape, model.dtype, scheme, plain, stored)


_HEAD = "lm_head.weight"


def _one_of(model: Any, stock: Any, choice: WeightChoice, merge: bool, name: str) -> Tensor:
    """One tensor of a weight that the plan changes."""
    return weight_state(model, stock, choice, merge)[name]
