"""The tokens that routed experts see: a sample of them, and the gradients at what the experts write.

Without some experts a token t is written d_t less. That costs about ``1/2 E[c_t d_t^T G d_t]`` nats a token, with
G = E[g g^T] of the gradients g at the experts' output (``gac.measurement.calibration``) and counts
c_t = |g_t|^p / E[|g|^p]. At p = 2 G and the weighted d have the exact partial traces of the Fisher matrix.
"""

from collections.abc import MutableMapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from gac.core.errors import PlanError
from gac.core.linalg import add_square, fits_tf32, mirrored, tf32_products
from gac.measurement.sums import TINY, RunningSums
from gac.models.examples import Examples, TokenWindows
from gac.models.sites import Weight

TOKENS = 16384
"""Tokens of a text that are kept: the same in every layer, drawn from all of its windows."""
NAMES = ("inputs", "counts", "gradients", "power")


def name_of(what: str, stack: str) -> str:
    return f"routed-{what}/{stack}"


def check_text_alone(windows: TokenWindows) -> None:
    """Refuse text about images, whose padding would be among the tokens that are kept."""
    if isinstance(windows, Examples):
        remedy = "Calibrate on text alone, or leave the form out of forms= (--form)."
        raise PlanError("the form experts with text about images", "text alone", remedy)


class RoutedSums(RunningSums):
    """The sample and the sums of one layer's routed experts, and the hook that adds windows; see ``MomentSums``."""

    def __init__(self, stacks: Sequence[Weight], power: float, shape: Sequence[int], first: int) -> None:
        windows, length = shape
        self._power, self._tokens, self._next, self._dtype = power, windows * length, first * length, torch.float32
        draw = torch.Generator().manual_seed(0)
        self._chosen = torch.randperm(self._tokens, generator=draw)[:TOKENS].sort().values
        self._stacks = [weight.name for weight in stacks]
        self.hooks = {name: partial(self._listen, name) for name in self._stacks}
        shapes: dict[str, tuple[int, ...]] = {}
        for weight in stacks:
            size, count = weight.in_features, len(self._chosen)
            of_stack = ((count, size), (count,), (size, size), ())
            shapes |= {name_of(what, weight.name): of for what, of in zip(NAMES, of_stack, strict=True)}
        super().__init__(shapes)

    def means(self) -> dict[str, Tensor]:
        means: dict[str, Tensor] = {}
        for stack in self._stacks:
            inputs, counts, gradients, power = (self.sums.pop(name_of(what, stack)) for what in NAMES)
            power = power.double() / self._tokens
            of_stack = inputs.to(self._dtype), (counts / power.clamp_min(TINY)).float(), None, power
            means |= {name_of(what, stack): of for what, of in zip(NAMES, of_stack, strict=True) if of is not None}
            means[name_of("gradients", stack)] = mirrored(gradients).div_(self._tokens).float()
        return means

    def _listen(self, stack: str, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(partial(self._add, stack, inputs[0].detach()))  # type: ignore[no-untyped-call]

    def _add(self, stack: str, activations: Tensor, gradients: Tensor) -> None:
        x, g = (tensor.detach().reshape(-1, tensor.shape[-1]) for tensor in (activations, gradients))
        device, start = g.device, self._next
        self._next, self._dtype = start + len(g), x.dtype
        counts = g.float().norm(dim=1) ** self._power
        self.total(name_of("power", stack), device).add_(counts.sum())
        places = ((self._chosen >= start) & (self._chosen < self._next)).nonzero()[:, 0]
        rows = (self._chosen[places] - start).to(device)
        for what, values in (("inputs", x), ("counts", counts)):
            total = self.total(name_of(what, stack), device)
            total[places.to(device)] = values[rows].to(total.dtype)
        with tf32_products(fits_tf32(gradients)):
            add_square(self.total(name_of("gradients", stack), device), g.float())


def mixed_tokens(texts: Sequence[MutableMapping[str, Tensor]], shares: Tensor) -> dict[str, Tensor]:
    """The tokens of several texts in one sample, each text with its share of the mixture (they add up to 1)."""
    mixture: dict[str, Tensor] = {}
    for stack in [key.partition("/")[2] for key in texts[0] if key.startswith(name_of("power", ""))]:
        inputs, counts, gradients, powers = ([text.pop(name_of(what, stack)) for text in texts] for what in NAMES)
        power, tokens = float(shares @ torch.stack(powers).to(shares)), sum(map(len, counts))
        scales = [
            float(share) * tokens / len(of_text) * float(of_power) / max(power, TINY)
            for of_text, share, of_power in zip(counts, shares, powers, strict=True)
        ]
        weighted = [of_text * scale for of_text, scale in zip(counts, scales, strict=True)]
        means = [float(share) * of_text for share, of_text in zip(shares, gradients, strict=True)]
        mixture |= {name_of("inputs", stack): torch.cat(inputs), name_of("counts", stack): torch.cat(weighted)}
        mixture[name_of("gradients", stack)] = torch.stack(means).sum(0)
        mixture[name_of("power", stack)] = torch.tensor(power, dtype=torch.float64)
    return mixture
