"""The trainable parameters of a compressed model: those of its changed weights and its norms, and quantised numbers."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gac.healing.sharding import gather_like, local_part, shard_like
from gac.healing.straight_through import StraightThrough
from gac.models.families import family_of
from gac.models.modules import last_norm_of
from gac.plan.plan import Plan, WeightChoice
from gac.runtime.fusion.shared_gemm import FusedMember
from gac.runtime.storage.modules import StoredLinear, stored_modules
from gac.schemes import scheme_named

logger = logging.getLogger(__name__)

Snapshot = dict[str, Tensor]  # values of parameters by name; of a sharded model, this process's shards


def trained_weights(plan: Plan, dense: bool) -> list[WeightChoice]:
    """The weights that change, or all of them; routers and routed experts stay as they are."""
    return [choice for choice in plan.weights if (dense or choice.changed) and not choice.weight.is_routed]


class Trainables:
    """The trainable parameters in float32, by their names in the model, in its order; no others need gradients."""

    def __init__(self, model: Any, weights: Sequence[WeightChoice], trained: Collection[str]) -> None:
        self._model = model
        chosen = [choice for choice in weights if choice.name in trained]
        self._quantized = _replace_stored(model, chosen)
        candidates = [parameter for choice in chosen for parameter in _parameters_of(model, choice)]
        candidates += _norm_parameters(model, weights)
        ids = {id(each) for each in candidates if each.is_floating_point() and each.numel()}
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in model.named_parameters() if id(parameter) in ids
        }
        self._dtypes = {name: parameter.dtype for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.data = parameter.data.float()
            parameter.requires_grad_(False)

    @property
    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    def rebind(self) -> None:
        current = dict(self._model.named_parameters())
        self.parameters = {name: current[name] for name in self.parameters}

    def of_layer(self, layer: str) -> dict[str, nn.Parameter]:
        return {name: each for name, each in self.parameters.items() if name.startswith(f"{layer}.")}

    def rms(self) -> dict[str, float]:
        """The root mean square of each, by name; only before sharding."""
        return {name: float(each.detach().square().mean().sqrt()) for name, each in self.parameters.items()}

    def snapshot(self, reuse: Snapshot | None = None, on_device: bool = False) -> Snapshot:
        return snapshot(self.parameters, reuse, on_device)

    def gather(self, values: Snapshot | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors of a snapshot, or of the current values; every process has to iterate."""
        for name, value in (_local(self.parameters) if values is None else values).items():
            yield name, gather_like(self.parameters[name], value)

    def shard(self, values: Snapshot) -> Snapshot:
        return {name: shard_like(self.parameters[name], value) for name, value in values.items()}

    @torch.no_grad()
    def restore(self, values: Snapshot) -> None:
        for name, value in values.items():
            local_part(self.parameters[name]).copy_(value)

    def close(self, changed: bool) -> None:
        """Restore the dtype and the storages of the model; ``changed=False`` drops changes to stored matrices."""
        for name, parameter in self.parameters.items():
            parameter.data = parameter.data.to(self._dtypes[name])
        for name, (module, stored) in self._quantized.items():
            self._model.set_submodule(name, module.store() if changed else stored)


def snapshot(parameters: Mapping[str, Tensor], reuse: Snapshot | None = None, on_device: bool = False) -> Snapshot:
    """Copy the values of parameters to the host, or ``on_device``; overwriting an old snapshot is faster."""
    copies = {}
    for name, value in _local(parameters).items():
        device, old = value.device if on_device else torch.device("cpu"), (reuse or {}).get(name)
        copies[name] = value.to(device, copy=True) if old is None or old.device != device else old.copy_(value)
    return copies


def _local(parameters: Mapping[str, Tensor]) -> Snapshot:
    return {name: local_part(parameter.detach()) for name, parameter in parameters.items()}


@contextmanager
def gradients_of(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in parameters.values():
            parameter.grad = None
            parameter.requires_grad_(False)


def _replace_stored(model: Any, weights: Sequence[WeightChoice]) -> dict[str, tuple[StraightThrough, StoredLinear]]:
    """Replace the stored matrices of weights by trainable ones; returns both by name."""
    replaced, untrained = {}, set()
    for choice in weights:
        scheme = scheme_named(choice.scheme)
        inside = stored_modules(model.get_submodule(choice.name)) if scheme.lossy else {}
        for path, stored in inside.items():
            assert isinstance(stored, StoredLinear)
            grid = scheme.grid(stored.tensors, *stored.matrix)
            if grid is None or not grid.numbers.numel():
                untrained.add(choice.scheme)
                continue
            replaced[f"{choice.name}.{path}".rstrip(".")] = StraightThrough(stored, scheme, grid), stored
    for name, (module, _) in replaced.items():
        model.set_submodule(name, module)
    for name in sorted(untrained):
        logger.warning("weights in %s stay as they are: the scheme does not say how they are trained", name)
    return replaced


def _parameters_of(model: Any, choice: WeightChoice) -> list[nn.Parameter]:
    """The parameters of a weight, including those of its fused GEMM, but not those that a scheme has quantised."""
    module = model.get_submodule(choice.name)
    parameters = list(module.parameters())
    if isinstance(module, FusedMember):
        parameters += module.fused_parameters()
    if not scheme_named(choice.scheme).lossy:
        return parameters
    trainable = (part for part in module.modules() if isinstance(part, StraightThrough))
    masters = {id(parameter) for part in trainable for parameter in part.parameters()}
    return [parameter for parameter in parameters if id(parameter) in masters]


def _norm_parameters(model: Any, weights: Sequence[WeightChoice]) -> list[nn.Parameter]:
    """The vectors of the decoder layers that belong to no weight, and the last norm."""
    layers, last = family_of(model.config).layers, last_norm_of(model)
    inside = tuple(f"{choice.name}." for choice in weights)
    named = model.get_submodule(layers).named_parameters(prefix=layers)
    vectors = [parameter for name, parameter in named if parameter.dim() == 1 and not name.startswith(inside)]
    return vectors if last is None else [*vectors, *model.get_submodule(last).parameters()]
