"""Steps of AdamW on some parameters: rates relative to their size, warm-up, cosine, clipped gradients."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import cos, isfinite, log2, pi

import torch
from torch import Tensor, nn

from gac.core.distributed.ranks import Ranks
from gac.core.errors import HealingError
from gac.healing.shards import parts_like, whole

WARM_UP = 0.05
"""The part of the work over which the rate rises."""
LAST = 0.05
"""What the rate ends at, as a part of its highest."""
COOLING = 0.1
"""The part of the work in which the rate falls where a text is overfitted."""
BETAS = (0.9, 0.95)
CLIPPED = 1.0
"""The largest norm of all gradients together."""
SMALLEST = 2**-10
"""What counts as the size of parameters that are smaller, or zero."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class Descent:
    """An optimiser whose rate is relative to what is trained.

    Args:
        parameters: by name.
        sizes: the root mean square of what each was before healing, by name.
        rate: the highest, relative to that.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], sizes: Mapping[str, float], rate: float, ranks: Ranks
    ) -> None:
        self._parameters, self._ranks = dict(parameters), ranks
        grouped: dict[int, list[nn.Parameter]] = defaultdict(list)
        for name, one in parameters.items():  # a group for each power of two, so that groups are few
            grouped[round(log2(max(sizes[name], SMALLEST)))].append(one)
        groups = [{"params": own, "highest": rate * 2.0**power} for power, own in sorted(grouped.items())]
        fused = all(one.is_cuda for one in parameters.values())
        self._optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0, fused=fused)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is moved."""
        return [*self._parameters.values()]

    def step(self, loss: Tensor, part: float, where: str) -> float:
        """Move the parameters against their gradients, which are taken from them, and are the same in every process.

        Args:
            loss: of this process's share of a batch.
            part: of the highest rate that is taken now.
            where: what an error calls the step.

        Returns:
            The loss of the whole batch.

        Raises:
            HealingError: the loss or a gradient is not finite; nothing was moved.
        """
        mean = loss.detach().float().clone()
        self._ranks.average([mean])
        clipped = whole(nn.utils.clip_grad_norm_(self._parameters.values(), CLIPPED))
        value, norm = map(float, torch.stack([mean, clipped.to(mean)]).tolist())  # all that a step waits for
        if not (isfinite(value) and isfinite(norm)):
            what = f"a loss of {value:g}" if not isfinite(value) else f"gradients of norm {norm:g}"
            raise HealingError(
                f"{what} in {where}", "finite ones", "Heal with a smaller learning_rate, or in another dtype."
            )
        for group in self._optimizer.param_groups:
            group["lr"] = group["highest"] * part
        self._optimizer.step()
        self._optimizer.zero_grad()
        return value

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """The moments and counts of every parameter whole, one after the other; all processes ask for each."""
        held = self._optimizer.state
        for name, one in self._parameters.items():
            for what in (*MOMENTS, "step") if one in held else ():
                yield f"{what}/{name}", whole(held[one][what].detach())

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from such a state."""
        for name, one in self._parameters.items():
            if f"step/{name}" in state:
                moments = {what: parts_like(one.data, state[f"{what}/{name}"]) for what in MOMENTS}
                step = state[f"step/{name}"].to(one.device if self._optimizer.defaults["fused"] else "cpu", copy=True)
                self._optimizer.state[one] = {"step": step, **moments}


def scheduled(progress: float) -> float:
    """The rate, as a part of its highest, where so much of the work is done.

    >>> scheduled(WARM_UP), round(scheduled(1.0), 3)
    (1.0, 0.05)
    """
    if progress < WARM_UP:
        return max(progress / WARM_UP, LAST)
    return _fallen((progress - WARM_UP) / (1 - WARM_UP))


def cooled(progress: float, begun: float) -> float:
    """The same where the rate falls to its end from some part of the work on, within ``COOLING`` of it.

    >>> cooled(0.5, 0.5) == scheduled(0.5), round(cooled(0.6, 0.5) / scheduled(0.5), 3)
    (True, 0.05)
    """
    return scheduled(begun) * _fallen(min(1.0, (progress - begun) / COOLING))


def _fallen(part: float) -> float:
    """A cosine from 1 to ``LAST``."""
    return LAST + (1 - LAST) * (1 + cos(pi * part)) / 2
