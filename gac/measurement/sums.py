"""Running sums of one layer's weights over calibration windows, and the moments that they become."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from gac.core.distributed.ranks import Ranks
from gac.core.linalg import add_square, fits_tf32, mirrored, tf32_products
from gac.models.examples import Example, Examples, TokenWindows, sizes_of
from gac.models.sites import Weight
from gac.runtime.storage.eight_bits import READERS

TINY = torch.finfo(torch.float32).tiny
TOKENS, CPU_TOKENS = 8192, 2048
"""Tokens that run at once, in whole windows: enough to keep a GPU busy with a small model. A CPU is kept busy by fewer,
and spends much of its time on new memory where tensors are larger than what it keeps of the old."""


def first_half(windows: int) -> int:
    return (windows + 1) // 2


def parts_of(windows: int, length: int, cut: int, device: torch.device) -> list[slice]:
    """Divide windows of ``length`` tokens into parts that run at once, none of them across the window ``cut``."""
    step = max(1, (CPU_TOKENS if device.type == "cpu" else TOKENS) // length)
    ends = sorted({0, min(max(cut, 0), windows), windows})
    return [slice(at, min(at + step, end)) for start, end in pairwise(ends) for at in range(start, end, step)]


def parts_at_once(windows: TokenWindows, cut: int, device: torch.device) -> list[slice]:
    """``parts_of`` these windows; examples run one by one."""
    if isinstance(windows, Examples):
        return [slice(number, number + 1) for number in range(len(windows))]
    return parts_of(len(windows), windows.shape[1], cut, device)


def noise_name(reader: str, weight: str) -> str:
    return f"{reader}-noise/{weight}"


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


@dataclass(frozen=True, eq=False)
class _Read:
    """Activations ``(windows, tokens, features)``, and what all weights that read them sum.

    Attributes:
        rows: their numbers ``(tokens, features)``, float32; ``sizes`` without signs.
        counts: |x|^p of each token.
        noise: squared errors ``(tokens, features)`` by reader.
    """

    activations: Tensor
    rows: Tensor
    sizes: Tensor
    counts: Tensor
    noise: Mapping[str, Tensor]


class MomentSums(RunningSums):
    """The sums of one layer's weights, and the hooks that add windows to them.

    Args:
        windows: all of the text.
        first: the number of the first window that this process runs. Windows of both halves never run at once.
        readers: the quantisers of inputs (``gac.runtime.storage.eight_bits.READERS``) whose noise is summed.
    """

    def __init__(
        self, weights: Sequence[Weight], power: float, windows: TokenWindows, first: int, readers: Sequence[str] = ()
    ) -> None:
        self._text = windows
        self._windows, self._length = windows.shape
        self._power, self._first, self._readers = power, first, readers
        self._half = first_half(self._windows)
        self._tokens: dict[str, list[Tensor]] = {weight.name: [] for weight in weights}
        self._last: _Read | None = None
        self.hooks = {weight.name: partial(self._listen, weight.name) for weight in weights}
        shapes: dict[str, tuple[int, ...]] = {}
        for weight in weights:
            read, wrote, name = (weight.in_features,), (weight.out_features,), weight.name
            shapes |= {f"both/{name}": (), f"scale/{name}": read}
            shapes |= {noise_name(reader, name): read for reader in readers}
            for half in range(1 if self._windows == self._half else 2):
                shapes |= {f"inputs/{half}/{name}": 2 * read, f"gradients/{half}/{name}": 2 * wrote}
        super().__init__(shapes)

    def bring_to(self, owner: int, ranks: Ranks) -> None:
        super().bring_to(owner, ranks)
        for name, counted in self._tokens.items() if ranks.count > 1 else ():
            rows = torch.stack(counted)
            every = rows.new_zeros(self._windows, self._length)
            every[self._first : self._first + len(rows)] = rows
            self._tokens[name] = list(ranks.total_at(owner, every))

    def means(self) -> dict[str, Tensor]:
        """The float32 moments, and what ``gac.measurement.mixture`` needs to mix them; the sums are gone."""
        means = {f"tokens/{name}": torch.stack(counted) for name, counted in self._tokens.items()}
        sizes = sizes_of(self._text)
        counted_windows = [sum(sizes[: self._half]), sum(sizes[self._half :])]
        means["windows"] = torch.tensor(counted_windows, dtype=torch.float64)
        for name in self._tokens:
            counted = means[f"tokens/{name}"].sum(1, dtype=torch.float64)
            both = self.sums.pop(f"both/{name}").clamp_min(TINY)
            counts = torch.stack([counted[: self._half].sum(), counted[self._half :].sum()])
            means |= {f"counts/{name}": counts, f"power/{name}": both.double() / counted.sum().clamp_min(TINY)}
            for what in (f"scale/{name}", *(noise_name(reader, name) for reader in self._readers)):
                means[what] = self.sums.pop(what).div_(counted.sum().clamp_min(TINY)).float()
            for half, part in enumerate((counted[: self._half], counted[self._half :])):
                alike = counted_windows[half] * self._length * both / counted.sum()
                for what, count in (("inputs", part.sum().clamp_min(TINY)), ("gradients", alike)):
                    if len(part):
                        square = mirrored(self.sums.pop(f"{what}/{half}/{name}"))
                        means[f"{what}/{half}/{name}"] = square.div_(count).float()
        return means

    def _listen(self, name: str, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(partial(self._add, name, inputs[0].detach()))  # type: ignore[no-untyped-call]

    def _add(self, name: str, activations: Tensor, gradients: Tensor) -> None:
        x, g = self._read(activations), gradients.detach().reshape(-1, gradients.shape[-1]).float()
        device, of_g = g.device, self._counts(g)
        number = self._first + len(self._tokens[name])
        half = number // self._half
        if isinstance(window := self._text[number], Example):
            of_g[window.length :] = 0
        self._tokens[name].extend(of_g.view(-1, self._length))
        self.total(f"both/{name}", device).add_(of_g @ x.counts)
        self.total(f"scale/{name}", device).add_(x.sizes.T @ of_g)
        for reader, errors in x.noise.items():
            self.total(noise_name(reader, name), device).add_(errors.T @ of_g)
        with tf32_products(fits_tf32(activations)):
            add_square(self.total(f"inputs/{half}/{name}", device), x.rows * of_g.sqrt()[:, None])
        with tf32_products(fits_tf32(gradients)):
            add_square(self.total(f"gradients/{half}/{name}", device), g * x.counts.sqrt()[:, None])

    def _counts(self, rows: Tensor) -> Tensor:
        counts: Tensor = rows.norm(dim=1) ** self._power
        return counts

    def _read(self, activations: Tensor) -> _Read:
        """Compute what is summed of an input, once for weights that share it."""
        seen = None if self._last is None else self._last.activations
        if seen is None or (seen.data_ptr(), seen.shape) != (activations.data_ptr(), activations.shape):
            rows, noise = activations.reshape(-1, activations.shape[-1]).float(), {}
            for reader in self._readers:
                numbers, scale = READERS[reader](rows)
                noise[reader] = numbers.mul_(scale).sub_(rows).square_()
            # It keeps the input from being let go, and another from its place.
            self._last = _Read(activations, rows, rows.abs(), self._counts(rows), noise)
        assert self._last is not None
        return self._last
