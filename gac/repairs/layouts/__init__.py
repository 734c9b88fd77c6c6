"""The layouts that repair knows: each finds the shared dims of a checkpoint."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from gac.core.errors import CheckpointError
from gac.models.loading import is_checkpoint
from gac.repairs.dims import SharedDim
from gac.repairs.layouts.factors import PEERS
from gac.repairs.layouts.planned import planned_dims
from gac.repairs.layouts.pruned import DenseModel, dense_model, fewer_heads, mlp_widths, value_heads
from gac.repairs.weight_files import Source

LAYOUTS: Mapping[str, Callable[[Source, DenseModel], Iterable[SharedDim]]] = MappingProxyType(
    {peer.layout: peer.find for peer in PEERS}
    | {"latent attention": value_heads, "MLP widths": mlp_widths, "fewer heads": fewer_heads}
)
"""Of checkpoints that others wrote; GAC's own are read by their plan."""


def find_dims(source: Source) -> dict[str, tuple[SharedDim, ...]]:
    """Every shared dim of a checkpoint, by layout.

    Raises:
        CheckpointError: there is none, or the tensors contradict each other or the config.
    """
    if is_checkpoint(source.directory):
        return {"GAC": tuple(planned_dims(source))}
    dense = dense_model(source.config)
    layouts = {name: dims for name, find in LAYOUTS.items() if (dims := tuple(find(source, dense)))}
    if not layouts:
        raise CheckpointError(
            f"{source.directory} (model_type {source.config.get('model_type')!r}) has nothing that can be padded",
            f"{', '.join(LAYOUTS)}, or a checkpoint of GAC",
            "Check the names of its tensors.",
        )
    fixed = " and ".join(name for name, dims in layouts.items() if any(dim.fixed for dim in dims))
    others = " and ".join(name for name, dims in layouts.items() if any(dim.form is None for dim in dims))
    if fixed and others:  # forms describe all weights, or none
        raise source.contradiction(
            f"{fixed} beside {others}",
            f"{fixed} in a model whose other weights are dense, but for MLPs with fewer neurons",
            "Multiply the factors out, or factor a model with all its heads.",
        )
    return layouts
