"""Mixtures of experts: what stands in the place of the MLP in layers that route their tokens, from a config alone.

The routed experts and the router stay as they are, unless a form takes them. The shared expert is an MLP that every
token passes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from gac.core.errors import ModelError
from gac.models.sites import LARGEST_SIZE, Weight

STEPS = ("decoder_sparse_step", "moe_layer_interval")
GROUPS = ("n_group", "topk_group")
ROUTED = "moe"  # the kind of layers that are a mixture of experts alone


@dataclass(frozen=True)
class RoutedParams:
    """Parameters of the routed experts of a layer or a model, and those of them that work on a token."""

    params: int
    active: int


@dataclass(frozen=True)
class Routing:
    """The layers with experts: a function of the layer and of the values of the config that the keys name."""

    keys: tuple[str, ...]
    of: Callable[..., bool]


@dataclass(frozen=True)
class SharedExpert:
    """The MLP that every token passes beside the routed experts. Names are those in a layer."""

    name: str
    width: tuple[str, ...]  # the config's keys whose product it is; without a shared expert it is 0, or None
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    blocks: int = 1  # as in ``Family``
    adds: bool = True  # what ``down`` wrote is added as it is, in a new tensor, to what the routed experts wrote
    gate: str | None = None  # the linear weight whose output multiplies it, which stays


@dataclass(frozen=True)
class Experts:
    """The routed experts of one layout. Names are those in a layer; what is left out is as in Qwen 3."""

    routing: Routing
    count: str = "num_experts"  # the config's key, as are the next two
    active: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    shared: SharedExpert | None = None
    block: str = "mlp"  # the module that routes
    router: str = "mlp.gate"
    stack: str = "mlp.experts"  # the module that holds the experts
    matrices: int = 3  # of an expert: 2 where nothing gates
    biased: bool = False
    # Some experts of a layer can go, with their rows of the router: it reads the hidden states alone, and returns
    # logits, and weights and numbers of the experts of each token. No expert differs from others.
    removable: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the config from which sizes follow."""
        return (self.count, self.active, self.width, *(self.shared.width if self.shared else ()), *self.routing.keys)

    def are_in(self, config: Any, layer: int) -> bool:
        return self.routing.of(layer, *(getattr(config, key) for key in self.routing.keys))

    def shared_width(self, config: Any) -> int:
        """The neurons of the shared expert; 0 where there is none."""
        return prod(getattr(config, key) or 0 for key in self.shared.width) if self.shared else 0

    def params(self, config: Any) -> RoutedParams:
        """Parameters of the routed experts of a layer that has them."""
        count, active, width = (getattr(config, key) for key in (self.count, self.active, self.width))
        hidden = getattr(config, "moe_latent_size", None) or config.hidden_size
        biases = (self.matrices - 1) * width + hidden if self.biased else 0
        of_expert = self.matrices * width * hidden + biases
        return RoutedParams(count * of_expert, active * of_expert)

    def weights(self, config: Any) -> Iterator[Weight]:
        """The router and the routed experts."""
        count, active, width = (getattr(config, key) for key in (self.count, self.active, self.width))
        groups, chosen = (getattr(config, key, None) or 0 for key in GROUPS)
        routed = partial(
            Weight, in_features=config.hidden_size, top_k=active, expert_groups=groups, chosen_groups=chosen
        )
        yield routed(self.router, count)
        yield routed(self.stack, self.matrices * width, experts=count, blocks=self.matrices)

    def check(self, config: Any) -> None:
        """Refuse sizes that no model can have, by a ModelError."""
        for key, most in ((self.count, 2**16), (self.width, LARGEST_SIZE), (self.active, getattr(config, self.count))):
            value = getattr(config, key, None)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                limit = f"{most:,}, which is {self.count}" if key == self.active else f"{most:,}"
                raise ModelError(f"a config with {key} {str(value)[:40]}", f"1 to {limit}", "Check config.json.")
        for key in self.routing.keys:
            if key in STEPS and (step := getattr(config, key)) < 1:
                raise ModelError(f"a config with {key} {step}", "1 or more", "Check config.json.")
        count, active = getattr(config, self.count), getattr(config, self.active)
        groups, chosen = (getattr(config, key, None) or 1 for key in GROUPS)
        if count % groups or not 1 <= chosen <= groups or active > chosen * (count // groups):
            problem = f"a config with {count} experts in n_group {groups}, of which topk_group {chosen} are chosen"
            expected = f"groups that divide the experts, and hold the {active} of a token ({self.active})"
            raise ModelError(problem, expected, "Check config.json.")
        if "mlp_layer_types" in self.routing.keys:
            _check_kinds(config.mlp_layer_types, config.num_hidden_layers)


def _check_kinds(kinds: Sequence[str], layers: int) -> None:
    if len(kinds) != layers or not set(kinds) <= {_DENSE, _SPARSE}:
        named = ", ".join(sorted(map(str, {*kinds})))[:40]
        problem = f"a config with mlp_layer_types of {len(kinds)} entries ({named})"
        raise ModelError(problem, f"{layers}, one a layer, each {_DENSE} or {_SPARSE}", "Check config.json.")


_DENSE, _SPARSE = "dense", "sparse"

EVERYWHERE = Routing((), lambda _layer: True)
BY_KIND = Routing(("mlp_layer_types",), lambda layer, kinds: kinds[layer] == _SPARSE)
ALONE = Routing(("layer_types",), lambda layer, kinds: kinds[layer] == ROUTED)
"""Layers that are a mixture alone (Nemotron-H)."""

LISTED = Routing(("moe_layers",), lambda layer, listed: layer in listed)


def behind(key: str) -> Routing:
    """Behind as many dense layers as the config says."""
    return Routing((key,), lambda layer, dense: layer >= dense)


STEPPED = Routing(
    ("decoder_sparse_step", "mlp_only_layers"),
    lambda layer, step, dense: (layer + 1) % step == 0 and layer not in dense,
)
"""Every so many layers, but for some (Qwen)."""

BETWEEN = Routing(
    ("moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index"),
    lambda layer, step, first, last: (layer + 1) % step == 0 and first <= layer <= last,
)
"""Every so many layers from a first to a last one (ERNIE)."""
