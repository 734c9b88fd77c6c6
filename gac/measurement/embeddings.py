"""The embedding and the LM head quantised, and the loss of that.

They are rounded to nearest, since no input statistics exist for them. The loss is measured by running the model with
nothing else changed.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gac.core.errors import ModelError
from gac.core.linalg import check_measured
from gac.core.progress import progress_bar
from gac.measurement.calibration import CalibrationRun
from gac.measurement.runs import diverged, predicted, sampled
from gac.models.modules import frozen, swap_in, swapped
from gac.models.plain import check_in_memory
from gac.plan.evidence import RoundedHead
from gac.runtime.storage.embeddings import embeddings_of, unusual
from gac.runtime.storage.embeddings import replace_embeddings as stored_embeddings
from gac.runtime.storage.modules import Stored
from gac.schemes import Scheme
from gac.schemes.base import storage_of

ROWS = 2**13
"""Rows quantised at once, to bound memory; each row is quantised alone."""


def check_embeddings(model: PreTrainedModel) -> None:
    check_in_memory(model, ", with head=...", "where embedding and head are rounded", ", or leave head out")
    for name, module in embeddings_of(model).items():
        if said := unusual(module):
            problem = f"{name} of a {type(model).__name__} is {said}, with embedding and head to be rounded"
            raise ModelError(problem, "a plain embedding and a linear head", "Leave head out for this model.")


def embedding_shapes(model: PreTrainedModel) -> tuple[tuple[int, int], ...]:
    """Rows and columns of embedding and LM head; of the embedding alone where they are tied."""
    weights = [module.weight for module in embeddings_of(model).values()]
    shapes: list[tuple[int, int]] = [tuple(weight.shape) for weight in weights]
    return tuple(shapes[:1] if _tied(model) else shapes)


@torch.no_grad()
def quantised_embeddings(model: PreTrainedModel, scheme: Scheme) -> dict[str, nn.Module]:
    if (storage := storage_of(scheme)) is None:
        return {}
    modules = stored_embeddings(model, storage, _tied(model))
    for name, module in modules.items():
        if isinstance(module, Stored):
            matrix = model.get_submodule(name).get_parameter("weight")
            stated = {key: tensor.to(matrix.device) for key, tensor in storage.metadata_for(*matrix.shape).items()}
            module.fill(_by_rows(scheme, matrix) | stated)
    return modules


def replace_embeddings(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> None:
    """Replace embedding and LM head; their own storage ties them, so transformers must not."""
    if modules:
        swap_in(model, modules)
        model.all_tied_weights_keys.clear()


def measure_head(run: CalibrationRun, model: PreTrainedModel, scheme: Scheme) -> RoundedHead:
    """Quantise embedding and LM head; return them with the mean divergence that this makes."""
    stored = run.stored(f"head-{scheme.name}", lambda: {"loss": _divergence(run, quantised_embeddings(model, scheme))})
    return RoundedHead(scheme.name, embedding_shapes(model), float(stored["loss"]))


def _divergence(run: CalibrationRun, modules: Mapping[str, nn.Module]) -> Tensor:
    """Run window by window, so that two sets of predictions are alive at most; float64."""
    windows, losses = sampled(run.windows), []
    with frozen(run.model), torch.no_grad():
        for window in progress_bar("rounding the head", "window", steps=windows, shown=run.progress):
            dense = predicted(run.model, window)
            with swapped(run.model, modules):
                losses.append(diverged(dense, predicted(run.model, window)))
    loss = torch.stack(losses).double().mean().clamp_min(0)
    check_measured(loss, "the divergence with embedding and head rounded is not finite", "a finite one")
    return loss


def _tied(model: PreTrainedModel) -> bool:
    modules = [*embeddings_of(model).values()]
    return len(modules) == 2 and modules[0].weight is modules[1].weight


def _by_rows(scheme: Scheme, matrix: Tensor) -> dict[str, Tensor]:
    parts = [scheme.stored(rows) for rows in torch.split(matrix.detach(), ROWS)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
