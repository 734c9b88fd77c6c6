"""Running sums of one layer's weights over calibration windows, and the moments that they become."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from gac.core.distributed.ranks import Ranks
from gac.core.linalg import add_square, fits_tf32, mirrored, tf32_products
from gac.models.sites import Weight
from gac.runtime.storage.eight_bits import READERS

TINY = torch.finfo(torch.float32).tiny


def first_half(windows: int) -> int:
    return (windows + 1) // 2


class RunningSums:
    """Sums by name over the windows that this process runs; float64 on a CPU and float32 on a GPU."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.sums: dict[str, Tensor] = {}

    def total(self, name: str, device: torch.device) -> Tensor:
        if name not in self.sums:
            dtype = torch.float64 if device.type == "cpu" else torch.float32
            self.sums[name] = torch.zeros(self.shapes[name], dtype=dtype, device=device)
        return self.sums[name]

    def bring_to(self, owner: int, ranks: Ranks) -> None:
        """Add up the sums of all processes, each of its own windows, at the owner; the others' are gone."""
        devices = [total.device for total in self.sums.values()]
        for name in self.shapes if ranks.count > 1 else ():
            ranks.total_at(owner, self.total(name, devices[0]))
            if not ranks.owns(owner):
                del self.sums[name]


class MomentSums(RunningSums):
    """The sums of one layer's weights, and the hooks that add each window to them.

    Args:
        windows: how many windows the text has.
        first: the number of the first window that this process runs.
    """

    def __init__(self, weights: Sequence[Weight], power: float, windows: int, first: int) -> None:
        self._power, self._windows, self._first = power, windows, first
        self._half = first_half(windows)
        self._tokens: dict[str, list[Tensor]] = {weight.name: [] for weight in weights}
        self._read: tuple[Tensor, dict[str, Tensor]] | None = None
        self.hooks = {weight.name: partial(self._listen, weight.name) for weight in weights}
        shapes: dict[str, tuple[int, ...]] = {}
        for weight in weights:
            read, wrote, name = (weight.in_features,), (weight.out_features,), weight.name
            shapes |= {f"both/{name}": (), f"scale/{name}": read}
            shapes |= {f"{reader}-noise/{name}": read for reader in READERS}
            for half in range(1 if windows == self._half else 2):
                shapes |= {f"inputs/{half}/{name}": 2 * read, f"gradients/{half}/{name}": 2 * wrote}
        super().__init__(shapes)

    def bring_to(self, owner: int, ranks: Ranks) -> None:
        super().bring_to(owner, ranks)
        for name, counted in self._tokens.items() if ranks.count > 1 else ():
            rows = torch.stack(counted)
            every = rows.new_zeros(self._windows, rows.shape[1])
            every[self._first : self._first + len(rows)] = rows
            self._tokens[name] = list(ranks.total_at(owner, every))

    def means(self) -> dict[str, Tensor]:
        """The float32 moments, and what each token counted, ``(windows, tokens)``; the sums are gone."""
        means = {f"tokens/{name}": torch.stack(counted) for name, counted in self._tokens.items()}
        for name in self._tokens:
            counted = means[f"tokens/{name}"].sum(1, dtype=torch.float64)
            length = means[f"tokens/{name}"].shape[1]
            both = self.sums.pop(f"both/{name}").clamp_min(TINY)
            for what in ("scale", *(f"{reader}-noise" for reader in READERS)):
                means[f"{what}/{name}"] = self.sums.pop(f"{what}/{name}").div_(counted.sum().clamp_min(TINY)).float()
            for half, part in enumerate((counted[: self._half], counted[self._half :])):
                alike = len(part) * length * both / counted.sum()
                for what, count in (("inputs", part.sum().clamp_min(TINY)), ("gradients", alike)):
                    if len(part):
                        square = mirrored(self.sums.pop(f"{what}/{half}/{name}"))
                        means[f"{what}/{half}/{name}"] = square.div_(count).float()
        return means

    def _listen(self, name: str, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(partial(self._add, name, inputs[0].detach()))  # type: ignore[no-untyped-call]

    def _add(self, name: str, activations: Tensor, gradients: Tensor) -> None:
        x = activations.reshape(-1, activations.shape[-1]).float()
        g = gradients.detach().reshape(-1, gradients.shape[-1]).float()
        of_g, of_x = (rows.norm(dim=1) ** self._power for rows in (g, x))
        half = (self._first + len(self._tokens[name])) // self._half
        self._tokens[name].append(of_g)
        self.total(f"both/{name}", x.device).add_(of_g @ of_x)
        self.total(f"scale/{name}", x.device).add_(x.abs().T @ of_g)
        for reader, errors in self._noise_of(activations, x).items():
            self.total(f"{reader}-noise/{name}", x.device).add_(errors.T @ of_g)
        with tf32_products(fits_tf32(activations)):
            add_square(self.total(f"inputs/{half}/{name}", x.device), x * of_g.sqrt()[:, None])
        with tf32_products(fits_tf32(gradients)):
            add_square(self.total(f"gradients/{half}/{name}", g.device), g * of_x.sqrt()[:, None])

    def _noise_of(self, activations: Tensor, x: Tensor) -> dict[str, Tensor]:
        """Squared errors ``(tokens, features)`` by reader; computed once for weights that share an input."""
        if self._read is not None:
            seen, noise = self._read
            if (seen.data_ptr(), seen.shape) == (activations.data_ptr(), activations.shape):
                return noise
        noise = {}
        for reader, read in READERS.items():
            numbers, scale = read(x)
            noise[reader] = numbers.mul_(scale).sub_(x).square_()
        self._read = activations, noise  # which keeps the input from being let go, and another from its place
        return noise
