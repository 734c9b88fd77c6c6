"""Kriging: predict the residuals of shapes, beyond a roofline, from those of measured shapes near them.

Rasmussen and Williams, Gaussian Processes for Machine Learning (2006): the mean of a Gaussian process, equation 2.25.
"""

from dataclasses import dataclass

import numpy as np

from gac.core.arrays import Floats, Ints, alignment_class

MOST = 1000
"""Shapes that are fitted at most: a thousand in 0.2 s. Of more, a fixed random thousand."""

# Standard deviations of log latency, and the correlation lengths along log sizes. Chosen on the shipped tables, with
# one model's shapes at a time left out.
_BROAD, _STAIRS, _NOISE = 0.3, 0.3, 0.01
_FAR, _NEAR = 2.0, 0.05
_CLASS_REACH = 4.0

_BATCH = 64


@dataclass(frozen=True, eq=False)
class Kriging:
    """A field of log-latency residuals over log sizes and alignment classes.

    It is a sum of a broad part and, for each axis, of stairs: steps at the same sizes of that axis for all sizes of the
    other axes, since tiles and waves end there. Every part falls off exponentially with distance, and with each
    doubling of an axis' alignment class.
    """

    sizes: Floats  # logs of the shapes' sizes, shape ``(n, axes)``
    classes: Floats  # log2 of the sizes' alignment classes, shape ``(n, axes)``
    weights: Floats  # ``K^-1`` times the residuals, shape ``(n,)``

    @classmethod
    def fit(cls, shapes: Ints, residuals: Floats) -> "Kriging":
        """Fit the residuals ``(n,)`` at the shapes ``(n, axes)``."""
        from scipy.linalg import cho_factor, cho_solve

        sizes, classes = _coordinates(shapes)
        factor = cho_factor(_covariance_with_noise(sizes, classes), lower=True, overwrite_a=True)
        return cls(sizes, classes, cho_solve(factor, residuals))

    def predict(self, shapes: Ints) -> Floats:
        """Return the expected residual at each of the shapes ``(shapes, axes)``; 0 far from all that was fitted."""
        result = np.empty(len(shapes))
        for start in range(0, len(shapes), _BATCH):
            part = slice(start, start + _BATCH)
            result[part] = _covariance(_coordinates(shapes[part]), (self.sizes, self.classes)) @ self.weights
        return result

    def left_out(self, blocks: Ints) -> Floats:
        """Return for each fitted residual the error of its prediction without its block; both of shape ``(n,)``.

        Without fitting again: ``(K^-1)_bb^-1 (K^-1 y)_b`` for block b, equation 5.12 there for more than one point.
        """
        inverse = np.linalg.inv(_covariance_with_noise(self.sizes, self.classes))
        errors = np.empty(len(blocks))
        for block in np.unique(blocks):
            members = np.flatnonzero(blocks == block)
            errors[members] = np.linalg.solve(inverse[np.ix_(members, members)], self.weights[members])
        return errors


def drawn(count: int) -> Ints:
    """Choose the shapes to fit among ``count``: all up to ``MOST``, else as many at random (fixed seed); sorted."""
    return np.arange(count) if count <= MOST else np.sort(np.random.default_rng(0).permutation(count)[:MOST])


def _coordinates(shapes: Ints) -> tuple[Floats, Floats]:
    return np.log(shapes.astype(np.float64)), np.log2(alignment_class(shapes).astype(np.float64))


def _covariance_with_noise(sizes: Floats, classes: Floats) -> Floats:
    covariance = _covariance((sizes, classes), (sizes, classes))
    covariance[np.diag_indices(len(sizes))] += _NOISE**2
    return covariance


def _covariance(shapes: tuple[Floats, Floats], fitted: tuple[Floats, Floats]) -> Floats:
    sizes, classes = (
        [np.abs(axis[:, None] - other) for axis, other in zip(a.T, b.T, strict=True)]
        for a, b in zip(shapes, fitted, strict=True)
    )
    covariance: Floats = np.exp(-sum(sizes) / _FAR - sum(classes) / _CLASS_REACH)
    covariance *= _BROAD**2 + _STAIRS**2 * sum(np.exp(-axis * (1 / _NEAR - 1 / _FAR)) for axis in sizes)
    return covariance
