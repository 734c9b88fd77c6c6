"""The press that evicts by a plan, and the ways to generate with it. Imports kvpress."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any, NoReturn

from kvpress import BasePress
from transformers import GenerationConfig, PreTrainedModel

from gac.core.errors import GacError, PlanError
from gac.models.attentions import Heads, heads_of, sliding_layers
from gac.runtime.contract import COMPRESSED
from gac_extensions.tokens.attending import Prefill, attending, attentions, evict
from gac_extensions.tokens.plan import TokenPlan
from gac_extensions.tokens.presses import evicted, press_of

_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")


class PlannedPress(BasePress):  # type: ignore[misc]  # kvpress has no types
    """A press of kvpress with a number of tokens for each layer: ``with press(model): model.generate(ids)``.

    As with any press, a context with nothing before it is evicted. The tokens that follow run inside the ``with`` too,
    where masks fit layers of different lengths.
    """

    def __init__(self, plan: TokenPlan) -> None:
        self.plan = plan
        self._press, _, _ = press_of(plan.press, plan.options)

    @property
    def compression_ratio(self) -> float:
        return 1 - self.plan.used / self.plan.total

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Iterator[None]:
        """Evict after each prefill inside.

        A PlanError says if the model has other layers or heads than the plan, a GacError, inside, if the context is not
        read in one forward pass.
        """
        plan, config = self.plan, model.config.get_text_config()
        layers, count = [layer.layer for layer in plan.layers], len(plan.layers) + len(plan.whole)
        family = model.config.model_type.removeprefix(COMPRESSED)
        described = _described(family, len(attentions(model)), heads_of(config), sliding_layers(config))
        expected = _described(plan.family, count, plan.heads, plan.whole)
        if described != expected:
            raise PlanError(
                described, f"{expected}, as {plan.model}", "Use the plan with the model that it was made for."
            )
        with _single_prefill(model), attending(model, layers, self._evict):
            yield

    def _evict(self, prefill: Prefill) -> None:
        tokens = prefill.hidden.shape[1]
        kept = self.plan.kept(prefill.layer, tokens)
        if kept < tokens:
            evict(prefill.cache, *evicted(self._press, prefill, kept))


def _described(family: str, layers: int, heads: Heads, uncut: Sequence[int]) -> str:
    sizes = f"{heads.queries} query heads and {heads.cached} key-value heads of {heads.length} numbers"
    sliding = f", layers {', '.join(map(str, uncut))} of a sliding window" if uncut else ""
    return f"a {family} of {layers} layers with {sizes}{sliding}"


@contextmanager
def _single_prefill(model: PreTrainedModel) -> Iterator[None]:
    """Let ``generate`` refuse modes whose first forward pass is not exactly the context."""
    changed: Any = model  # an attribute of the model hides the method of its class
    if "generate" in vars(model):
        raise GacError("a press within a press", "one press for a model", "Leave the first one before the second.")
    generate = changed.generate

    @wraps(generate)
    def checked(*args: Any, **options: Any) -> Any:
        named = signature(generate).bind(*args, **options).arguments
        config, _ = changed._prepare_generation_config(named.get("generation_config"), **named.get("kwargs", {}))
        _check_mode(config, named.get("assistant_model"), named.get("custom_generate"))
        return generate(*args, **options)

    changed.generate, changed.init_continuous_batching = checked, _refuse_batching
    try:
        yield
    finally:
        del changed.generate, changed.init_continuous_batching


def _check_mode(config: GenerationConfig, assistant: Any, custom: Any) -> None:
    mode = config.get_generation_mode(assistant)
    refused = {
        "custom_generate": custom is not None,
        "assistant_model": assistant is not None,
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens is not None,
        "prefill_chunk_size": config.prefill_chunk_size is not None,
        "cache_implementation": config.cache_implementation not in (None, "dynamic"),
        f"the options of {mode.value}": mode not in _MODES,
    }
    if option := next((option for option, is_refused in refused.items() if is_refused), None):
        raise GacError(
            f"generate with {option} and a press",
            "one forward pass over the whole context, then one for each token: a press evicts after the first",
            f"Leave out {option}, or generate without the press.",
        )


def _refuse_batching(*_: Any, **__: Any) -> NoReturn:
    expected = "a DynamicCache, from which tokens can be taken"
    raise GacError("continuous batching with a press", expected, "Use generate instead.")
