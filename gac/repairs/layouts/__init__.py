"""The layouts that repair knows: for each, the shared dims that it finds in a checkpoint."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gac.errors import CheckpointError
from gac.models.loading import is_checkpoint
from gac.repairs.dense import DenseModel, dense_model
from gac.repairs.layouts.attention import value_heads
from gac.repairs.layouts.latents import head_groups
from gac.repairs.layouts.pairs import PEERS, factored_pairs
from gac.repairs.layouts.planned import planned_blocks
from gac.repairs.layouts.widths import mlp_widths
from gac.repairs.shared_dims import Block
from gac.repairs.weight_files import Source

Layout = Callable[[Source, DenseModel], Iterable[Block]]

LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        **{f"pairs of {peer.name}": factored_pairs(peer) for peer in PEERS},
        "head groups of PaLU": head_groups,
        "latent attention": value_heads,
        "MLP widths": mlp_widths,
    }
)
"""Of checkpoints that others wrote; GAC's own are read by their plan."""


@dataclass(frozen=True)
class Found:
    """The blocks of a checkpoint, and which layouts they are of."""

    blocks: tuple[Block, ...]
    layouts: tuple[str, ...]


def find_blocks(source: Source) -> Found:
    """Every shared dim of a checkpoint.

    Raises:
        CheckpointError: nothing is found, or the tensors contradict one another or the config.
    """
    if is_checkpoint(source.directory):
        return Found(tuple(planned_blocks(source)), ("GAC",))
    dense = dense_model(source.config)
    by_layout = {name: tuple(read(source, dense)) for name, read in LAYOUTS.items()}
    found = {name: blocks for name, blocks in by_layout.items() if blocks}
    if not found:
        raise CheckpointError(
            f"{source.directory} (model_type {source.config.get('model_type')!r}) has nothing that can be padded",
            f"{', '.join(LAYOUTS)}, or a checkpoint of GAC",
            "Check the names of its tensors.",
        )
    return Found(tuple(block for blocks in found.values() for block in blocks), tuple(found))
