"""The statistics of a second shot: inputs as the dense model has them, gradients as a compressed model has them.

The curvature at the dense model says what a small error costs. What is planned is no small error: gradients taken where
a first plan has led to are nearer to what its next one meets. Its inputs are of no use, for what was cut away never
shows in them, and another plan would cut there at no cost (``results/curvature.md``). This is the re-estimation
of the curvature between shots of LLM Surgeon (arXiv 2312.17244), on one of its two sides.
"""

from collections.abc import Iterator, Sequence

from gac.measurement.calibration import CalibrationRun, LayerMoments, stream_moments
from gac.models.sites import Site

FIRST_KEPT = 0.8
"""Kept fraction of the first shot; measured for second shots to 0.8 and to 0.6."""
_OF_GRADIENTS = ("gradients/", "tokens/")


def stream_second(
    dense: CalibrationRun, first: CalibrationRun, sites: Sequence[Site]
) -> Iterator[tuple[int, LayerMoments | None]]:
    """Yield ``(layer, moments)`` for the weights of ``sites`` as ``stream_moments`` does.

    Both models run over the same windows, a layer of one and then the same layer of the other; labels are drawn from
    each by itself. Layers whose moments are in a store are read.

    Args:
        first: of the first shot's model, with weights of the dense one's shapes; it has to be the same whenever an
            interrupted run goes on.

    Raises:
        ModelError: the loss or a statistic is not finite.
        StatisticsError: what is kept cannot be written or read.
    """
    gradients = stream_moments(first, sites)
    for layer, moments in stream_moments(dense, sites):
        same, other = next(gradients)
        assert layer == same
        if moments is not None and other is not None:
            gradient_names = [name for name in other.tensors if name.startswith(_OF_GRADIENTS)]
            moments.tensors.update((name, other.tensors[name]) for name in gradient_names)
            other.tensors.clear()  # so that what is not asked for is let go before the layer is decomposed
        yield layer, moments
    next(gradients, None)  # what it does after its last layer
