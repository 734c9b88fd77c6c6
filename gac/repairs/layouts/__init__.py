"""The layouts that repair knows: each finds the shared dims of a checkpoint."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from gac.core.errors import CheckpointError
from gac.models.loading import is_checkpoint
from gac.repairs.dims import Block
from gac.repairs.layouts.factors import PEERS, factored
from gac.repairs.layouts.planned import planned_blocks
from gac.repairs.layouts.pruned import DenseModel, dense_model, fewer_heads, mlp_widths, value_heads
from gac.repairs.weight_files import Source

LAYOUTS: Mapping[str, Callable[[Source, DenseModel], Iterable[Block]]] = MappingProxyType(
    {
        **{f"{'head groups' if peer.grouped else 'pairs'} of {peer.name}": factored(peer) for peer in PEERS},
        "latent attention": value_heads,
        "MLP widths": mlp_widths,
        "fewer heads": fewer_heads,
    }
)
"""Of checkpoints that others wrote; GAC's own are read by their plan."""


def find_blocks(source: Source) -> dict[str, tuple[Block, ...]]:
    """Every shared dim of a checkpoint, by layout.

    Raises:
        CheckpointError: there is none, or the tensors contradict each other or the config.
    """
    if is_checkpoint(source.directory):
        return {"GAC": tuple(planned_blocks(source))}
    dense = dense_model(source.config)
    layouts = {name: blocks for name, read in LAYOUTS.items() if (blocks := tuple(read(source, dense)))}
    if not layouts:
        raise CheckpointError(
            f"{source.directory} (model_type {source.config.get('model_type')!r}) has nothing that can be padded",
            f"{', '.join(LAYOUTS)}, or a checkpoint of GAC",
            "Check the names of its tensors.",
        )
    shared = {name: [dim for block in blocks for dim in block.shared] for name, blocks in layouts.items()}
    fixed = [name for name, dims in shared.items() if any(dim.fixed for dim in dims)]
    others = [name for name, dims in shared.items() if any(dim.form is None for dim in dims)]
    if fixed and others:  # forms describe all weights, or none
        raise source.contradiction(
            f"{' and '.join(fixed)} beside {' and '.join(others)}",
            f"{' and '.join(fixed)} in a model whose other weights are dense, but for MLPs with fewer neurons",
            "Multiply the factors out, or factor a model with all its heads.",
        )
    return layouts
