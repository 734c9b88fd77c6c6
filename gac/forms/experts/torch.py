"""Fewer routed experts in a layer: the order in which they go, and the rows that stay."""

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gac.forms.experts.elimination import Elimination, Routing, eliminate, products
from gac.forms.narrow.elimination import last_to_go
from gac.forms.tensors import Fit, SiteBuild, Statistics, TensorForm
from gac.models.sites import Weight
from gac.models.streaming import on_its_device

logger = logging.getLogger(__name__)


class ExpertsTensors(TensorForm):
    """Keeps the order in which experts go, and the tokens that reached each."""

    def refit(self, mode: str, weight: Weight) -> None:
        return None

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        routed = [weight for weight in weights if weight.top_k]
        for router, stack in zip(routed[::2], routed[1::2], strict=True):
            elimination = _eliminated(statistics, router, stack)
            _warn_of_unreached(elimination, stack)
            yield Fit(stack, elimination.loss, {"order": elimination.order, "reached": elimination.reached})

    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> dict[str, Tensor]:
        stack = next(other for other in build.weights if other.experts)
        kept = last_to_go(build.artifacts.of(self.form, "order", stack), dim)
        dense = build.statistics.model.get_submodule(weight.name)
        return {name: values.detach()[kept.to(values.device)] for name, values in dense.named_parameters()}


@torch.no_grad()
def _eliminated(statistics: Statistics, router: Weight, stack: Weight) -> Elimination:
    assert statistics.routed is not None, f"the tokens of {stack.name} were not kept"
    tokens, modules = statistics.routed(stack), [statistics.model.get_submodule(each.name) for each in (router, stack)]
    with on_its_device(modules[0]), on_its_device(modules[1]):
        routing, gram = Routing(modules[0], tokens.inputs), products(modules[1], stack.experts, tokens)
        return eliminate(routing, gram, tokens.counts, stack.top_k)


def _warn_of_unreached(elimination: Elimination, stack: Weight) -> None:
    numbers = (elimination.reached == 0).nonzero()[:, 0].tolist()
    if numbers:
        some = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        logger.warning("%s: no token of the calibration text reached experts %s: they lose nothing", stack.name, some)
