"""The layouts that repair knows: for each, the shared dims that it finds in a checkpoint."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from gac.core.errors import CheckpointError
from gac.models.loading import is_checkpoint
from gac.repairs.dense import DenseModel, dense_model
from gac.repairs.layouts.factors import PEERS, factored
from gac.repairs.layouts.heads import fewer_heads
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
        "fewer heads": fewer_heads,
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
    _check_sayable(source, found)
    return found


def _check_sayable(source: Source, found: Mapping[str, tuple[Block, ...]]) -> None:
    """Where heads are carried by a form, forms say all the rest too."""
    shared = {name: [one for block in blocks for one in block.shared] for name, blocks in found.items()}
    carried = [name for name, dims in shared.items() if any(one.carried for one in dims)]
    others = [name for name, dims in shared.items() if any(one.form is None for one in dims)]
    if carried and others:
        raise source.contradiction(
            f"{' and '.join(carried)} beside {' and '.join(others)}",
            f"{' and '.join(carried)} in a model whose other weights are dense, but for MLPs with fewer neurons",
            "Multiply the factors out, or factor a model with all its heads.",
        )
