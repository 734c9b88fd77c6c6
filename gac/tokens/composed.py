"""The press that evicts what a plan says, layer by layer. Imports kvpress."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvpress import BasePress
from torch import Tensor, nn
from transformers import PreTrainedModel

from gac.core.errors import PlanError
from gac.models.attentions import Heads, heads_of, sliding_layers
from gac.plan.token_plan import TokenPlan
from gac.runtime.contract import COMPRESSED
from gac.tokens.attending import attending, attentions, evict
from gac.tokens.generating import generating
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
            PlanError: the model has other layers or heads than the plan.
            GacError: inside, of ways to generate that do not read the context in one forward pass.
        """
        plan, config = self.plan, model.config.get_text_config()
        layers, whole = [layer.layer for layer in plan.layers], plan.whole
        family = model.config.model_type.removeprefix(COMPRESSED)
        found = _described(family, len(attentions(model)), heads_of(config), sliding_layers(config))
        count = len(layers) + len(whole)
        expected = _described(plan.family, count, plan.heads, whole)
        if found != expected or sorted((*layers, *whole)) != list(range(count)):
            given = "one of other layers" if found == expected else found
            raise PlanError(given, f"{expected}, as {plan.model}", "Use the plan with the model that it was made for.")
        with generating(model), attending(model, layers, self._evict):
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
        if kept < hidden.shape[1]:
            evict(cached, *evicted(self._press, attention, hidden, held, weights, given, kept))


def _described(family: str, layers: int, heads: Heads, whole: Sequence[int]) -> str:
    """``a llama of 2 layers with 4 query heads and 2 key-value heads of 16 numbers``."""
    sizes = f"{heads.queries} query heads and {heads.cached} key-value heads of {heads.length} numbers"
    sliding = f", layers {', '.join(map(str, whole))} of a sliding window" if whole else ""
    return f"a {family} of {layers} layers with {sizes}{sliding}"
