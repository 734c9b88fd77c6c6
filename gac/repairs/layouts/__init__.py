"""The layouts that repair knows: for each, the shared dims that it finds in a checkpoint."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from gac.errors import CheckpointError
from gac.models.loading import is_checkpoint
from gac.repairs.dense import DenseModel, dense_model
from gac.repairs.layouts.factors import PEERS, factored
from gac.repairs.layouts.planned import planned_blocks
from gac.repairs.layouts.vectors import mlp_widths, value_heads
from gac.repairs.shared_dims import Block
from gac.repairs.weight_files import Source

Layout = Callable[[Source, DenseModel], Iterable[Block]]

LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        **{f"{'head groups' if peer.grouped else 'pairs'} of {peer.name}": factored(peer) for peer in PEERS},
        "latent attention": value_heads,
        "MLP widths": mlp_widths,
    }
)
"""Of checkpoints that others wrote; GAC's own are read by their plan."""


def find_blocks(source: Source) -> dict[str, tuple[Block, ...]]:
    """Every shared dim of a checkpoint, by layout.

    Raises:
        CheckpointError: nothing is found, or the tensors contradict one another or the config.
    """
    if is_checkpoint(source.directory):
        return {"GAC": tuple(planned_blocks(source))}
    dense = dense_model(source.config)
    found = {name: blocks for name, read in LAYOUTS.items() if (blocks := tuple(read(source, dense)))}
    if not found:
        raise CheckpointError(
            f"{source.directory} (model_type {source.config.get('model_type')!r}) has nothing that can be padded",
            f"{', '.join(LAYOUTS)}, or a checkpoint of GAC",
            "Check the names of its tensors.",
        )
    return found
