"""The statistics of a second shot: inputs as the dense model has them, gradients as a compressed model has them.

The curvature at the dense model says what a small error costs. What is planned is no small error: gradients taken where
a first plan has led to are nearer to what its next one meets. Its inputs are of no use, for what was cut away never
shows in them, and another plan would cut there at no cost (``docs/results-curvature.md``). This is the re-estimation
of the curvature between shots of LLM Surgeon (arXiv 2312.17244), on one of its two sides.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from gac.models.sites import Site
from gac.sensitivity.calibration import LayerMoments, stream_moments
from gac.sensitivity.store import StatisticsStore

_OF_GRADIENTS = ("gradients/", "tokens/")


def stream_second(
    dense: nn.Module,
    first: nn.Module,
    sites: Sequence[Site],
    windows: Tensor,
    *,
    power: float,
    stores: tuple[StatisticsStore, StatisticsStore],
    progress: bool,
) -> Iterator[tuple[int, LayerMoments]]:
    """Yield ``(layer, moments)`` for the weights of ``sites``, from the last layer to the first.

    Both models run over the same windows, a layer of one and then the same layer of the other; labels are drawn from
    each by itself. Layers whose moments are in a store are read.

    Args:
        first: the model of the first shot, with weights of the dense one's shapes; it has to be the same whenever an
            interrupted run goes on.
        stores: of the dense model's moments, and of the first shot's.

    Raises:
        ModelError: the loss or a statistic is not finite.
        StatisticsError: what is kept cannot be written or read.
    """
    inputs, gradients = (
        stream_moments(model, sites, windows, power=power, store=store, progress=progress)
        for model, store in zip((dense, first), stores, strict=True)
    )
    for layer, own in inputs:
        same, other = next(gradients)
        assert layer == same
        own.tensors.update((name, found) for name, found in other.tensors.items() if name.startswith(_OF_GRADIENTS))
        other.tensors.clear()  # so that what is not asked for is let go before the layer is decomposed
        yield layer, own
    next(gradients, None)  # what it does after its last layer
