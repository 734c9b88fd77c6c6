"""Kriging: what measured shapes say about shapes near them, beyond a roofline.

Rasmussen and Williams, Gaussian Processes for Machine Learning (2006): the mean of a Gaussian process, equation 2.25.
"""

from dataclasses import dataclass

import numpy as np

from gac.core.arrays import Floats, Ints
from gac.profiling.alignment import alignment_class

MOST = 1000
"""Shapes that are fitted at most: a thousand in 0.2 s. Of more, a thousand are drawn, always the same."""

# Standard deviations of log latency, and how far along log sizes they reach. Chosen on the shipped tables, with one
# model's shapes at a time left out.
_BROAD, _STAIRS, _NOISE = 0.3, 0.3, 0.01
_FAR, _NEAR = 2.0, 0.05
_CLASS_REACH = 4.0

_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class Kriging:
    """A field of log-latency residuals over log sizes and alignment classes.

    It is a sum of a broad part and, for each axis, of stairs: steps at the same sizes of that axis, whatever the other
    axes are, for tiles and waves are cut alike there. Every part falls off exponentially with distance, and with each
    doubling of an axis' alignment class.

    Attributes:
        sizes: logs of the shapes' sizes, shape ``(n, axes)``.
        classes: log2 of the sizes' alignment classes, likewise.
        weights: ``K^-1`` times the residuals, shape ``(n,)``.
    """

    sizes: Floats
    classes: Floats
    weights: Floats

    @classmethod
    def fit(cls, shapes: Ints, residuals: Floats) -> "Kriging":
        """Through the residuals ``(n,)`` at the shapes ``(n, axes)``."""
        from scipy.linalg import cho_factor, cho_solve

        sizes, classes = _placed(shapes)
        covariance = _noisy(sizes, classes)
        weights: Floats = cho_solve(cho_factor(covariance, lower=True, overwrite_a=True), residuals)
        return cls(sizes, classes, weights)

    def at(self, shapes: Ints) -> Floats:
        """The expected residual at each of the shapes ``(shapes, axes)``; 0 far from all that was fitted."""
        found = np.empty(len(shapes))
        for start in range(0, len(shapes), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            found[part] = _covariance(_placed(shapes[part]), (self.sizes, self.classes)) @ self.weights
        return found

    def left_out(self, blocks: Ints) -> Floats:
        """For each fitted residual, what is expected without its block misses it by; shape ``(n,)``.

        Without fitting again: ``(K^-1)_bb^-1 (K^-1 y)_b`` for block b, equation 5.12 there for more than one point.

        Args:
            blocks: which block each fitted shape belongs to.
        """
        inverse = np.linalg.inv(_noisy(self.sizes, self.classes))
        found = np.empty(len(blocks))
        for block in np.unique(blocks):
            ours = np.flatnonzero(blocks == block)
            found[ours] = np.linalg.solve(inverse[np.ix_(ours, ours)], self.weights[ours])
        return found


def drawn(count: int) -> Ints:
    """Which of so many shapes are fitted: all up to ``MOST``, else as many at random, always the same; sorted."""
    everything = np.arange(count)
    if count <= MOST:
        return everything
    return np.sort(np.random.default_rng(0).permutation(everything)[:MOST])


def _placed(shapes: Ints) -> tuple[Floats, Floats]:
    return np.log(shapes.astype(np.float64)), np.log2(alignment_class(shapes).astype(np.float64))


def _noisy(sizes: Floats, classes: Floats) -> Floats:
    """Of measured shapes with each other, each with noise of its own."""
    found = _covariance((sizes, classes), (sizes, classes))
    found[np.diag_indices(len(sizes))] += _NOISE**2
    return found


def _covariance(left: tuple[Floats, Floats], right: tuple[Floats, Floats]) -> Floats:
    """Of each left shape with each right one."""
    sizes, classes = (_apart(one, other) for one, other in zip(left, right, strict=True))
    found: Floats = np.exp(-sum(sizes) / _FAR - sum(classes) / _CLASS_REACH)
    found *= _BROAD**2 + _STAIRS**2 * sum(np.exp(-axis * (1 / _NEAR - 1 / _FAR)) for axis in sizes)
    return found


def _apart(left: Floats, right: Floats) -> list[Floats]:
    """How far each left row is from each right one along each axis."""
    return [np.abs(one[:, None] - other) for one, other in zip(left.T, right.T, strict=True)]
