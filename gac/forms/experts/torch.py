"""Fewer routed experts in a layer: the order in which they go, the rows that stay, and what these take over."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from gac.forms.curvature.metric import RoutedTokens
from gac.forms.experts.compensation import Compensation
from gac.forms.experts.elimination import Elimination, Routing, eliminate, products
from gac.forms.narrow.elimination import last_to_go
from gac.forms.tensors import Fit, SiteBuild, Statistics, TensorForm
from gac.models.sites import Weight
from gac.models.streaming import on_its_device

ANCHORS = 6
"""Counts of experts at which the share of the loss is measured that is left once others take over."""
logger = logging.getLogger(__name__)


class ExpertsTensors(TensorForm):
    """Keeps the order in which experts go, and the tokens on which those that stay are fitted."""

    def refit(self, mode: str, weight: Weight) -> None:
        return None

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        routed = [weight for weight in weights if weight.is_routed]
        for router, stack in zip(routed[::2], routed[1::2], strict=True):
            elimination = _eliminated(statistics, router, stack)
            _warn_of_unreached(elimination, stack)
            tensors, reached = vars(_tokens(statistics, stack)), elimination.reached.cpu().numpy().astype(np.float64)
            yield Fit(stack, elimination.loss, {"order": elimination.order, **tensors}, reached=reached)

    @torch.no_grad()
    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> dict[str, Tensor]:
        stack = next(other for other in build.weights if other.experts)
        kept = last_to_go(build.artifacts.of(self.form, "order", stack), dim)
        router, experts = (build.statistics.model.get_submodule(each.name) for each in build.weights)
        dense = experts if weight.experts else router
        rows = {name: values.detach()[kept] for name, values in dense.named_parameters()}
        if weight.experts and dim < weight.experts:
            names = (field.name for field in fields(RoutedTokens))
            tokens = RoutedTokens(*(build.artifacts.of(self.form, name, stack) for name in names))
            rows["down_proj"] = Compensation(experts, Routing(router, tokens.inputs), tokens, kept).down_proj()
        return rows


@torch.no_grad()
def _eliminated(statistics: Statistics, router: Weight, stack: Weight) -> Elimination:
    chooses, experts = (statistics.model.get_submodule(each.name) for each in (router, stack))
    with on_its_device(chooses), on_its_device(experts):
        tokens = _tokens(statistics, stack).to(next(experts.parameters()).device)  # where streamed weights are now
        routing, gram = Routing(chooses, tokens.inputs), products(experts, stack.experts, tokens)
        elimination = eliminate(routing, gram, tokens.counts, stack.top_k)
        del gram
        some = np.unique(np.linspace(stack.top_k, stack.experts - 1, ANCHORS).round().astype(np.int64))
        kept = [last_to_go(elimination.order, count) for count in some.tolist()]
        remaining = [Compensation(experts, routing, tokens, each).remaining for each in kept]
        loss = elimination.loss * np.interp(np.arange(stack.experts + 1), some, remaining)
        return replace(elimination, loss=np.maximum.accumulate(loss[::-1])[::-1].copy())


def _tokens(statistics: Statistics, stack: Weight) -> RoutedTokens:
    assert statistics.routed is not None, f"the tokens of {stack.name} were not kept"
    return statistics.routed(stack)


def _warn_of_unreached(elimination: Elimination, stack: Weight) -> None:
    numbers = (elimination.reached == 0).nonzero()[:, 0].tolist()
    if numbers:
        some = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        logger.warning("%s: no token of the calibration text reached experts %s: they lose nothing", stack.name, some)
