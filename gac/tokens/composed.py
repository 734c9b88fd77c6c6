"""The press that evicts what a plan says, layer by layer. Imports kvpress."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvpress import BasePress
from torch import Tensor, nn
from transformers import PreTrainedModel

from gac.errors import PlanError
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
            PlanError: the model has other layers than the plan.
        """
        plan, layers = self.plan, [one.layer for one in self.plan.layers]
        found = len(attentions(model)), model.config.model_type.removeprefix(COMPRESSED)
        if found != (wanted := (len(layers) + len(plan.whole), plan.family)):
            given = f"a {found[1]} of {found[0]} layers"
            expected = f"a {wanted[1]} of {wanted[0]}, as {plan.model}"
            raise PlanError(given, expected, "Use the plan with the model that it was made for.")
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
