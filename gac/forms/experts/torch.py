"""Fewer and narrower experts: the order in which experts and neurons go, and what those that stay take over."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from math import inf

import numpy as np
import torch
from torch import Tensor

from gac.core.arrays import Floats
from gac.forms.artifacts import LayerArtifacts
from gac.forms.curvature.metric import RoutedTokens
from gac.forms.experts import Experts, widths
from gac.forms.experts.compensation import Layer, Remainder
from gac.forms.experts.elimination import Elimination, Routing, eliminate, of_experts, products
from gac.forms.experts.neurons import neuron_order, parameters_at
from gac.forms.narrow.elimination import last_to_go
from gac.forms.tensors import Fit, SiteBuild, Statistics, TensorForm
from gac.models.sites import Weight
from gac.models.streaming import on_its_device

PRICED = 8192
"""Tokens of the sample on which experts are removed one at a time."""
COUNTS, WIDTHS = 5, 3
"""Counts and widths at which the loss is measured that is left once others take over."""
BASE = Experts()
logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Measured:
    """Of a layer: the order in which experts go, that of their neurons, the damping, and losses by width and count."""

    elimination: Elimination
    neurons: Tensor
    damping: float
    losses: dict[int, Floats]


class ExpertsTensors(TensorForm):
    """Keeps the order in which experts and neurons go, and the tokens on which those that stay are fitted."""

    form: Experts

    def refit(self, mode: str, weight: Weight) -> None:
        return None

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        routed = [weight for weight in weights if weight.is_routed and self.form == BASE]
        for router, stack in zip(routed[::2], routed[1::2], strict=True):
            measured, tokens = _measured(statistics, router, stack), _tokens(statistics, stack)
            _warn_of_unreached(measured.elimination, stack)
            reached = measured.elimination.reached.cpu().numpy().astype(np.float64)
            kept = {"order": measured.elimination.order, "neurons": measured.neurons, **vars(tokens)}
            kept["damping"] = torch.tensor(measured.damping, dtype=torch.float64)
            for width, loss in measured.losses.items():
                if width == stack.expert_width:
                    yield Fit(stack, loss, kept, reached=reached)
                else:
                    yield Fit(stack, loss, form=Experts(width))

    @torch.no_grad()
    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> dict[str, Tensor]:
        router, experts = (build.statistics.model.get_submodule(each.name) for each in build.weights)
        with on_its_device(router), on_its_device(experts):
            stack = next(other for other in build.weights if other.experts)
            kept = last_to_go(build.artifacts.of(BASE, "order", stack), dim)
            if not weight.experts:
                state = router.state_dict()
                return {name: of_experts(values, kept, stack.experts) for name, values in state.items()}
            width = self.form.routed_sizes(weight, dim)[1]
            orders, damping = (build.artifacts.of(BASE, name, stack) for name in ("neurons", "damping"))
            neurons = orders[kept, weight.expert_width - width :].sort(dim=1).values
            rows = parameters_at(experts, kept, neurons)
            if dim < weight.experts or width < weight.expert_width:
                tokens = kept_tokens(build.artifacts, stack)
                remainder = Layer(experts, Routing(router, tokens.inputs), tokens).without(kept, neurons)
                rows["down_proj"] = remainder.down_proj(float(damping))
            return rows


def kept_tokens(artifacts: LayerArtifacts, stack: Weight) -> RoutedTokens:
    """Return the tokens of routed experts that were kept for building."""
    return RoutedTokens(*(artifacts.of(BASE, field.name, stack) for field in fields(RoutedTokens)))


@torch.no_grad()
def _measured(statistics: Statistics, router: Weight, stack: Weight) -> _Measured:
    chooses, experts = (statistics.model.get_submodule(each.name) for each in (router, stack))
    with on_its_device(chooses), on_its_device(experts):
        tokens = _tokens(statistics, stack).to(next(experts.parameters()).device)  # where streamed weights are now
        priced = tokens.thinned(PRICED)
        gram = products(experts, stack.experts, priced)
        elimination = eliminate(Routing(chooses, priced.inputs), gram, priced.counts, BASE.least(stack))
        del gram
        layer = Layer(experts, Routing(chooses, tokens.inputs), tokens)
        grid = (stack.expert_width, *widths(stack.expert_width))
        neurons = _neurons(layer, grid[-1])
        return _losses(layer, elimination, neurons, stack, grid)


def _neurons(layer: Layer, least: int) -> Tensor:
    moments, reached = [], []
    for share in layer.shares():
        moments.append((share.neurons * layer.counts[share.tokens, None]).T @ share.neurons)
        reached.append(len(share.tokens))
    down = layer.experts.down_proj.detach()
    down = down if layer.experts.is_transposed else down.mT
    kind = torch.float32 if down.is_cuda else torch.float64
    counts = torch.tensor(reached, device=down.device)
    return neuron_order(torch.stack(moments).to(kind), counts, down.to(kind), layer.gradients.to(kind), least)


def _losses(layer: Layer, elimination: Elimination, neurons: Tensor, stack: Weight, grid: Sequence[int]) -> _Measured:
    """Measure some counts at some widths; between them what narrower experts lose further is linear in both."""
    multiple = BASE.multiple(stack)
    ends = BASE.least(stack) // multiple, stack.experts // multiple
    counts = multiple * np.unique(np.linspace(*ends, COUNTS).round().astype(np.int64))
    every, axis = stack.expert_width, np.arange(stack.experts + 1)
    places = np.unique(np.linspace(0, len(grid) - 1, WIDTHS + 1).round().astype(np.int64))
    sampled = [grid[place] for place in places[1:]]

    def remainder(count: int, width: int) -> Remainder:
        kept = last_to_go(elimination.order, count)
        return layer.without(kept, neurons[kept, every - width :].sort(dim=1).values)

    damping = remainder(int(counts[len(counts) // 2]), [every, *sampled][len(sampled) // 2]).damping
    of_counts = [remainder(int(count), every) for count in counts[:-1]]
    left = np.array([each.loss(damping) for each in of_counts])
    before = np.array([each.loss(inf) for each in of_counts])
    fewer = elimination.loss  # 0 where a token takes every expert
    if len(left):
        rest = np.divide(left, before, out=np.ones_like(left), where=before > left)
        more = np.append(np.maximum(left - before, 0), 0.0)  # where held-out tokens lose by what others gain
        fewer = fewer * np.interp(axis, counts[:-1], rest) + np.interp(axis, counts, more)
    further = {every: np.zeros(len(counts))}
    for width in sampled:
        narrower = np.array([remainder(int(count), width).loss(damping) for count in counts])
        further[width] = np.maximum(narrower - np.append(left, 0.0), 0.0)
    known, losses = sorted(further), dict[int, Floats]()
    for width in grid:
        at_counts = [np.interp(width, known, of_count) for of_count in np.array([further[each] for each in known]).T]
        curve = fewer + np.interp(axis, counts, at_counts)
        losses[width] = np.maximum.accumulate(curve[::-1])[::-1].copy()
    return _Measured(elimination, neurons, damping, losses)


def _tokens(statistics: Statistics, stack: Weight) -> RoutedTokens:
    assert statistics.routed is not None, f"the tokens of {stack.name} were not kept"
    return statistics.routed(stack)


def _warn_of_unreached(elimination: Elimination, stack: Weight) -> None:
    numbers = (elimination.reached == 0).nonzero()[:, 0].tolist()
    if numbers:
        some = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        logger.warning("%s: no token of the calibration text reached experts %s", stack.name, some)
