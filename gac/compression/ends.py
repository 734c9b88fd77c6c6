"""Embedding and head in a scheme: rounded to nearest, for nobody knows which inputs a head or an embedding gets."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gac.core.errors import ModelError
from gac.models.loading import check_in_memory
from gac.models.modules import swap_in
from gac.runtime.storage.embeddings import embeddings_of, replace_embeddings, unusual
from gac.runtime.storage.modules import Stored
from gac.schemes import Scheme
from gac.schemes.storages import storage_of

ROWS = 2**13
"""Rows that are rounded at once; each is by itself."""


def check_ends(model: PreTrainedModel) -> None:
    """Refuse a model whose embedding or head cannot be rounded.

    Raises:
        ModelError: one is offloaded, or is something else than a matrix.
    """
    check_in_memory(model, ", with head=...", "where embedding and head are rounded", ", or leave head out")
    for name, module in embeddings_of(model).items():
        if said := unusual(module):
            given = f"{name} of a {type(model).__name__} is {said}, with embedding and head to be rounded"
            raise ModelError(given, "a plain embedding and a linear head", "Leave head out for this model.")


def shapes_of_ends(model: PreTrainedModel) -> tuple[tuple[int, int], ...]:
    """Rows and columns of embedding and head; of one where they are tied."""
    weights = [module.weight for module in embeddings_of(model).values()]
    shapes: list[tuple[int, int]] = [tuple(weight.shape) for weight in weights]
    return tuple(shapes[:1] if _tied(model) else shapes)


@torch.no_grad()
def rounded_ends(model: PreTrainedModel, scheme: Scheme) -> dict[str, nn.Module]:
    """What stands in the place of embedding and head, by their names; nothing where the scheme does not round.

    Args:
        scheme: one whose storage has the tensors of each row apart. The model, which ``check_ends`` takes, is left
            alone.
    """
    if (storage := storage_of(scheme)) is None:
        return {}
    found = replace_embeddings(model, storage, _tied(model))
    for name, module in found.items():
        if isinstance(module, Stored):
            matrix = model.get_submodule(name).get_parameter("weight")
            stated = {tensor: held.to(matrix.device) for tensor, held in storage.metadata_for(*matrix.shape).items()}
            module.fill(_by_rows(scheme, matrix) | stated)
    return found


def swap_in_ends(model: PreTrainedModel, ends: Mapping[str, nn.Module]) -> None:
    """Replace embedding and head, which are then tied by themselves or not at all."""
    if ends:
        swap_in(model, ends)
        model.all_tied_weights_keys.clear()


def _tied(model: PreTrainedModel) -> bool:
    ends = [*embeddings_of(model).values()]
    return len(ends) == 2 and ends[0].weight is ends[1].weight


def _by_rows(scheme: Scheme, matrix: Tensor) -> dict[str, Tensor]:
    parts = [scheme.stored(rows) for rows in torch.split(matrix.detach(), ROWS)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
