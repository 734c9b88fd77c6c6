"""AdamW with rates relative to the size of each parameter, its schedule, and the span of work that it covers."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import cos, isfinite, log2, pi, sqrt

import torch
from torch import Tensor, nn

from gac.core.distributed.ranks import Ranks
from gac.core.errors import HealingError
from gac.healing.sharding import distribute_like, full_tensor

WARM_UP = 0.05  # the share of the work over which the rate rises
FINAL = 0.05  # the last rate, relative to the highest
COOLING = 0.1  # the share of the work over which the rate falls once a text is overfitted
BETAS = (0.9, 0.95)
MAX_NORM = 1.0
MIN_RMS = 2**-10  # parameters that are smaller, or zero, get the rate of this root mean square
MOMENTS = ("exp_avg", "exp_avg_sq")


class RelativeAdamW:
    """AdamW with a learning rate relative to ``rms``, the root mean square of each parameter before training."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], rms: Mapping[str, float], rate: float, ranks: Ranks):
        self._parameters, self._ranks = dict(parameters), ranks
        by_power: dict[int, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in parameters.items():  # one group per power of two, to have few groups
            by_power[round(log2(max(rms[name], MIN_RMS)))].append(parameter)
        groups = [{"params": members, "highest": rate * 2.0**power} for power, members in sorted(by_power.items())]
        fused = all(parameter.is_cuda for parameter in parameters.values())
        self._optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0, fused=fused)

    def step(self, loss: Tensor, scale: float, where: str) -> float:
        """Take a step at ``scale`` times the rate, clear the gradients, and return the mean loss of all processes.

        A HealingError says ``where`` the loss or a gradient is not finite; that step is not taken.
        """
        mean = loss.detach().float().clone()
        self._ranks.average([mean])
        norm = full_tensor(nn.utils.clip_grad_norm_(self._parameters.values(), MAX_NORM))
        value, length = map(float, torch.stack([mean, norm.to(mean)]).tolist())  # the only synchronisation of a step
        if not (isfinite(value) and isfinite(length)):
            bad = f"a loss of {value:g}" if not isfinite(value) else f"gradients of norm {length:g}"
            remedy = "Heal with a smaller learning_rate, or in another dtype."
            raise HealingError(f"{bad} in {where}", "a finite loss and finite gradients", remedy)
        for group in self._optimizer.param_groups:
            group["lr"] = group["highest"] * scale
        self._optimizer.step()
        self._optimizer.zero_grad()
        return value

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield moments and step counts as full tensors; every process has to iterate."""
        for name, parameter in self._parameters.items():
            state = self._optimizer.state.get(parameter) or {}
            for key in (*MOMENTS, "step") if state else ():
                yield f"{key}/{name}", full_tensor(state[key].detach())

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            if f"step/{name}" in state:
                moments = {key: distribute_like(parameter.data, state[f"{key}/{name}"]) for key in MOMENTS}
                device = parameter.device if self._optimizer.defaults["fused"] else torch.device("cpu")
                self._optimizer.state[parameter] = {"step": state[f"step/{name}"].to(device, copy=True), **moments}


def schedule(progress: float) -> float:
    """The learning rate relative to the highest, after this share of the work: warm-up, then a cosine.

    >>> schedule(WARM_UP), round(schedule(1.0), 3)
    (1.0, 0.05)
    """
    if progress < WARM_UP:
        return max(progress / WARM_UP, FINAL)
    return _cosine((progress - WARM_UP) / (1 - WARM_UP))


def cooling_schedule(progress: float, start: float) -> float:
    """The same if the rate falls to its end within ``COOLING`` of the work from ``start`` on.

    >>> cooling_schedule(0.5, 0.5) == schedule(0.5), round(cooling_schedule(0.6, 0.5) / schedule(0.5), 3)
    (True, 0.05)
    """
    return schedule(start) * _cosine(min(1.0, (progress - start) / COOLING))


def _cosine(progress: float) -> float:
    return FINAL + (1 - FINAL) * (1 + cos(pi * progress)) / 2


def rate_for_batch(rate: float, tokens: int, full: int) -> float:
    """Scale a learning rate meant for batches of ``full`` tokens by the square root rule (arXiv 2205.10287)."""
    return rate * sqrt(min(1.0, tokens / full))


class Span:
    """A span of work: a number of tokens, or of seconds from now on, of which an interrupted run has ``spent`` some."""

    def __init__(self, ranks: Ranks, seconds: float | None, tokens: int | None, spent: float = 0.0) -> None:
        self._ranks, self._seconds, self._tokens = ranks, seconds, tokens
        self._read = int(spent) if tokens is not None else 0
        self._start = time.monotonic() - (spent if tokens is None else 0.0)

    def add(self, tokens: int) -> None:
        self._read += tokens

    @property
    def spent(self) -> float:
        return float(self._read) if self._tokens is not None else time.monotonic() - self._start

    def progress(self) -> float:
        """The share of the work that is done, from 0 to 1; the same in every process."""
        if self._tokens is not None:
            return min(1.0, self._read / self._tokens) if self._tokens else 1.0
        seconds = self._seconds or 0.0
        return self._ranks.once(lambda: min(1.0, self.spent / seconds) if seconds > 0 else 1.0)
