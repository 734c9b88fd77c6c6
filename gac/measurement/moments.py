"""The moments of one layer's weights: read and written, pooled over the halves of the text."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from gac.core.linalg import at_once, packed, unpacked
from gac.forms.curvature.metric import Halves, Moments, RoutedTokens
from gac.measurement.routed import NAMES, name_of
from gac.measurement.store import read_tensors, write_tensors
from gac.measurement.sums import TINY, noise_name
from gac.models.sites import Weight
from gac.runtime.storage.eight_bits import READERS


@dataclass(frozen=True, eq=False)
class LayerMoments:
    """The moments of one layer's weights by name."""

    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, path: Path, device: torch.device, weights: Sequence[Weight]) -> "LayerMoments":
        sizes = {("inputs", weight.name): weight.in_features for weight in weights}
        sizes |= {("gradients", weight.name): weight.out_features for weight in weights}
        tensors = read_tensors(path, device)
        for name, side in _second_moments(tensors):
            tensors[name] = unpacked(tensors[name], sizes[side])
        return cls(tensors)

    def write(self, path: Path) -> None:
        """Write the moments, of each symmetric matrix a half."""
        write_tensors(
            path, self.tensors | {name: packed(self.tensors[name]) for name, _ in _second_moments(self.tensors)}
        )

    @property
    def loss(self) -> float:
        """Mean loss of the dense model over the windows, nats for a predicted token."""
        return float(self.tensors["loss"])

    @property
    def losses(self) -> Tensor:
        """The same for each of several texts, float64, shape ``(texts,)``; empty where there is one."""
        return self.tensors.get("losses", torch.zeros(0, dtype=torch.float64))

    def tokens(self, weight: Weight) -> Tensor:
        """Weight of each token in the moment of the inputs, |g|^p, shape ``(windows, tokens)``."""
        return self.tensors[f"tokens/{weight.name}"]

    def of(self, weight: Weight, pooled: Callable[[Halves], Tensor] = Halves.mean) -> Moments:
        """The moments of a weight, as ``of_all`` has them."""
        return self.of_all([weight], pooled)[weight]

    def of_all(self, weights: Sequence[Weight], pooled: Callable[[Halves], Tensor]) -> dict[Weight, Moments]:
        """The moments of weights; ``pooled`` makes one second moment of those of two halves of the windows.

        On a CPU it is called for several at once.
        """
        sides = {weight: self._sides(weight) for weight in weights}
        largest_first = sorted(chain(*sides.values()), key=lambda halves: -len(halves.first))
        pooled_sides = at_once(pooled, largest_first, [halves.first for halves in largest_first])
        made = dict(zip(largest_first, pooled_sides, strict=True))
        return {
            weight: Moments(made[read], made[wrote], self.tensors[f"scale/{weight.name}"], self._noise(weight))
            for weight, (read, wrote) in sides.items()
        }

    def attended(self, weight: Weight, pooled: Callable[[Halves], Tensor] = Halves.mean) -> Moments:
        """The moments of k_proj or v_proj as attention reads what is cached, where the run was asked for them."""
        share = _share(self.tensors["attended-windows"])
        inputs, gradients = (
            pooled(self._halves(f"attended-{what}", weight, share)) for what in ("inputs", "gradients")
        )
        return replace(self.of(weight), inputs=inputs, gradients=gradients)

    def routed(self, stack: Weight) -> RoutedTokens:
        """The tokens of routed experts, where the run was asked for them."""
        inputs, counts, gradients, _ = (self.tensors[name_of(what, stack.name)] for what in NAMES)
        return RoutedTokens(inputs, counts, gradients)

    def _sides(self, weight: Weight) -> tuple[Halves, Halves]:
        counts, windows = (_share(self.tensors[name]) for name in (f"counts/{weight.name}", "windows"))
        return self._halves("inputs", weight, counts), self._halves("gradients", weight, windows)

    def _noise(self, weight: Weight) -> dict[str, Tensor]:
        names = {reader: noise_name(reader, weight.name) for reader in READERS}
        return {reader: self.tensors[name] for reader, name in names.items() if name in self.tensors}

    def _halves(self, what: str, weight: Weight, share: float) -> Halves:
        first, second = (self.tensors.get(f"{what}/{half}/{weight.name}") for half in range(2))
        assert first is not None, f"no {what} of {weight.name} were measured"
        return Halves(first, second, share)


def _second_moments(names: Iterable[str]) -> list[tuple[str, tuple[str, str]]]:
    """List the names of matrices, each with its side and its weight: ``inputs/0/<weight>``, ``attended-inputs/...``."""
    parts = [(name, *name.removeprefix("attended-").split("/")) for name in names]
    return [(name, (side, rest[-1])) for name, side, *rest in parts if side in ("inputs", "gradients")]


def _share(halves: Tensor) -> float:
    return float(halves[0] / halves.sum().clamp_min(TINY))
