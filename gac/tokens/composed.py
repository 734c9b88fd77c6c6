"""The press that evicts what a plan says, layer by layer. Imports kvpress."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvpress import BasePress
from torch import Tensor, nn
from transformers import PreTrainedModel

from gac.errors import PlanError
from gac.models.attentions import heads_of, sliding_layers
from gac.runtime.contract import COMPRESSED
from gac.token_plan import TokenPlan
from gac.tokens.attending import attending, attentions
from gac.tokens.presses import evicted, press_of


class PlannedPress(BasePress):  # type: ignore[misc]  # kvpress has no types
    """A press of kvpress with a number of tokens for each layer: ``with press(model): model.generate(ids)``.

    Eviction is kvpress's. What is evicted follows a context that nothing precedes, as with any press of it. What comes
    after runs inside the ``with`` too, where masks fit layers of different lengths.

    Attributes:
        plan: what it evicts.
    """

    def __init__(self, plan: TokenPlan) -> None:
        self.plan = plan
        self._press, _, _ = press_of(plan.press, plan.options)

    @property
    def compression_ratio(self) -> float:
        """The part of all tokens that is evicted."""
        return 1 - self.plan.used / self.plan.total

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Iterator[None]:
        """Evict after each prefill inside.

        Raises:
            PlanError: the model has other layers or other heads than the plan.
        """
        plan, layers = self.plan, [layer.layer for layer in self.plan.layers]
        config = model.config.get_text_config()
        found = len(attentions(model)), model.config.model_type.removeprefix(COMPRESSED)
        remedy = "Use the plan with the model that it was made for."
        if found != (wanted := (len(layers) + len(plan.whole), plan.family)):
            given = f"a {found[1]} of {found[0]} layers"
            raise PlanError(given, f"a {wanted[1]} of {wanted[0]}, as {plan.model}", remedy)
        windows, heads = sliding_layers(config), heads_of(config)
        if (windows, heads) != (plan.whole, plan.heads):
            given = f"a model of {heads}, with sliding windows in layers {windows}"
            raise PlanError(given, f"{plan.heads}, with sliding windows in layers {plan.whole}", remedy)
        with attending(model, layers, self._evict):
            yield

    def _evict(
        self,
        attention: nn.Module,
        layer: int,
        hidden: Tensor,
        cached: Any,
        weights: Tensor | None,
        given: Mapping[str, Any],
    ) -> None:
        kept, held = self.plan.kept(layer, hidden.shape[1]), (cached.keys, cached.values)
        cached.keys, cached.values = evicted(self._press, attention, hidden, held, weights, given, kept)
