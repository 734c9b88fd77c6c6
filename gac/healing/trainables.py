"""What of a compressed model is trained: the parameters of its changed weights, its norms, and stored numbers."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gac.healing.shards import own_part, part_like, whole_like
from gac.healing.straight_through import StraightThrough
from gac.models.families import family_of
from gac.models.modules import last_norm_of
from gac.plan.plan import WeightChoice
from gac.runtime.fusion.shared_gemm import FusedMember
from gac.runtime.storage.modules import StoredLinear, stored_modules
from gac.schemes import scheme_named

logger = logging.getLogger(__name__)

Values = dict[str, Tensor]
"""Of parameters, by name: whole, or of a divided model what this process has of each."""


class Trainables:
    """The parameters that are trained, float32, by their names in the model; all others need no gradient.

    Args:
        weights: what every targeted weight has become.
        taken: names of those that are trained.

    Attributes:
        parameters: in model order.
    """

    def __init__(self, model: Any, weights: Sequence[WeightChoice], taken: Collection[str]) -> None:
        self._model = model
        self._inside = _straight_through(model, [choice for choice in weights if choice.name in taken])
        names = {id(one): name for name, one in model.named_parameters()}
        found = [one for choice in weights if choice.name in taken for one in _of_weight(model, choice)]
        found += _norms(model, weights)
        trained = {names[id(one)]: one for one in found if one.is_floating_point() and one.numel()}
        self.parameters: dict[str, nn.Parameter] = {name: trained[name] for name in names.values() if name in trained}
        self._dtypes = {name: one.dtype for name, one in self.parameters.items()}
        for one in self.parameters.values():
            one.data = one.data.float()
            one.requires_grad_(False)

    @property
    def count(self) -> int:
        """How many numbers are trained."""
        return sum(one.numel() for one in self.parameters.values())

    def found_again(self) -> None:
        """Take the parameters as the model has them now: in parts, where it was divided."""
        now = dict(self._model.named_parameters())
        self.parameters = {name: now[name] for name in self.parameters}

    def within(self, layer: str) -> dict[str, nn.Parameter]:
        """Those of a decoder layer, given by its name."""
        return {name: one for name, one in self.parameters.items() if name.startswith(f"{layer}.")}

    def sizes(self) -> dict[str, float]:
        """The root mean square of each, by name; asked for while they are whole."""
        return {name: float(one.detach().square().mean().sqrt()) for name, one in self.parameters.items()}

    def values(self, over: Values | None = None, near: bool = False) -> Values:
        """What they are now.

        Args:
            over: values that are needed no more, in whose memory these are then, which is faster than new memory.
            near: new memory is on the device of each, which is faster still, and not on the host.
        """
        return values_of(self.parameters, over, near)

    def gathered(self, values: Values | None = None) -> Iterator[tuple[str, Tensor]]:
        """Such values whole, or what they are now, one after the other; all processes ask for each."""
        for name, value in (_now(self.parameters) if values is None else values).items():
            yield name, whole_like(self.parameters[name], value)

    def divided(self, values: Values) -> Values:
        """What this process has of whole values."""
        return {name: part_like(self.parameters[name], value) for name, value in values.items()}

    @torch.no_grad()
    def restore(self, values: Values) -> None:
        """Make them what they were; some of them, or all."""
        for name, value in values.items():
            own_part(self.parameters[name]).copy_(value)

    def close(self, changed: bool) -> None:
        """Put the model back into its dtype and its storages.

        Args:
            changed: False leaves stored matrices as they were before.
        """
        for name, one in self.parameters.items():
            one.data = one.data.to(self._dtypes[name])
        for name, (module, stored) in self._inside.items():
            self._model.set_submodule(name, module.store() if changed else stored)


def values_of(parameters: Mapping[str, Tensor], over: Values | None = None, near: bool = False) -> Values:
    """What parameters are now, as ``Trainables.values`` gives them."""
    return {name: _kept(value, (over or {}).get(name), near) for name, value in _now(parameters).items()}


def _now(parameters: Mapping[str, Tensor]) -> Values:
    return {name: own_part(one.detach()) for name, one in parameters.items()}


def _kept(now: Tensor, over: Tensor | None, near: bool) -> Tensor:
    place = now.device if near else torch.device("cpu")
    if over is None or over.device != place:
        return now.to(place, copy=True)
    return over.copy_(now)


@contextmanager
def learning(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """With gradients for these parameters alone, which have none on exit."""
    try:
        for one in parameters.values():
            one.requires_grad_(True)
        yield
    finally:
        for one in parameters.values():
            one.grad = None
            one.requires_grad_(False)


def _straight_through(model: Any, weights: Sequence[WeightChoice]) -> dict[str, tuple[StraightThrough, StoredLinear]]:
    """The stored matrices of the weights, each replaced by what is trained in its place."""
    found, left = {}, set()
    for choice in weights:
        scheme = scheme_named(choice.scheme)
        inside = stored_modules(model.get_submodule(choice.name)) if scheme.lossy else {}
        for path, stored in inside.items():
            assert isinstance(stored, StoredLinear)
            grid = scheme.grid(stored.tensors, *stored.matrix)
            if grid is None or not grid.numbers.numel():
                left.add(choice.scheme)
                continue
            name = f"{choice.name}.{path}".rstrip(".")
            found[name] = StraightThrough(stored, scheme, grid), stored
    for name, (module, _) in found.items():
        model.set_submodule(name, module)
    for name in sorted(left):
        logger.warning("weights in %s stay as they are: the scheme does not say how they are trained", name)
    return found


def _of_weight(model: Any, choice: WeightChoice) -> list[nn.Parameter]:
    """The parameters of a weight's module, and those of the GEMM that it shares; none that a scheme has rounded."""
    module = model.get_submodule(choice.name)
    found = list(module.parameters())
    if isinstance(module, FusedMember):
        found += module.fused_parameters()
    if not scheme_named(choice.scheme).lossy:
        return found
    masters = {id(one) for part in module.modules() if isinstance(part, StraightThrough) for one in part.parameters()}
    return [one for one in found if id(one) in masters]


def _norms(model: Any, weights: Sequence[WeightChoice]) -> list[nn.Parameter]:
    """Those of the decoder layers and the last one: vectors that belong to no weight."""
    layers, last = family_of(model.config).layers, last_norm_of(model)
    inside = tuple(f"{choice.name}." for choice in weights)
    named = model.get_submodule(layers).named_parameters(prefix=layers)
    found = [one for name, one in named if one.dim() == 1 and not name.startswith(inside)]
    return found if last is None else [*found, *model.get_submodule(last).parameters()]
