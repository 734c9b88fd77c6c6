"""Where the tensors of a GGUF file come from: the numbers of a compressed model, under the stock model's names."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gac.checkpoint.export import unchanged_state, weight_state
from gac.plan import Plan, WeightChoice
from gac.runtime.ends import ends_of
from gac.runtime.stored import Stored
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
        return scheme_named(self.scheme).scaled(self.exact().view(self.stored.matrix), self.stored.held)


def sources(model: Any, stock: Any, plan: Plan, merge: bool) -> Iterator[Source]:
    """Every tensor of the stock model, in its order; a head that is the embedding is left out.

    Args:
        stock: as ``gac.checkpoint.export.stock_model`` gives it.
        merge: as for ``gac.export``. What is merged is stored no longer.
    """
    same, changed = unchanged_state(model, plan), {one.name: one for one in plan.weights if one.changed}
    ends = {f"{name}.weight": one for name, one in ends_of(model).items() if isinstance(one, Stored)}
    head = plan.measured.head.scheme if plan.measured.head else DEFAULT_SCHEME
    tied = {"lm_head.weight"} if stock.config.tie_word_embeddings else set()
    for name, empty in stock.state_dict().items():
        if name in tied:
            continue
        made = partial(Source, name, tuple(empty.shape), model.dtype)
        if (choice := changed.get(name.rpartition(".")[0])) is not None:
            yield _of_weight(made, model, stock, choice, merge)
        else:
            yield made(head if name in ends else DEFAULT_SCHEME, same[name], ends.get(name))


def _of_weight(made: "partial[Source]", model: Any, stock: Any, choice: WeightChoice, merge: bool) -> Source:
    """A tensor of a weight that the plan changed: its matrix may be stored, its bias is not."""
    name, module = made.args[0], model.get_submodule(choice.name)
    plain = partial(_one_of, model, stock, choice, merge, name)
    kept = isinstance(module, Stored) and not (merge and choice.form != _DENSE) and name.endswith(".weight")
    return made(choice.scheme, plain, module) if kept else made(DEFAULT_SCHEME, plain)


_DENSE = "dense"
"""The form whose matrix is as it was where others are merged."""


def _one_of(model: Any, stock: Any, choice: WeightChoice, merge: bool, name: str) -> Tensor:
    return weight_state(model, stock, choice, merge)[name]
