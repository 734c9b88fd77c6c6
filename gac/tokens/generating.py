"""Generation with a press: ways to generate that would evict from another context are refused by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any, NoReturn

from transformers import GenerationConfig, PreTrainedModel

from gac.core.errors import GacError

_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")


@contextmanager
def generating(model: PreTrainedModel) -> Iterator[None]:
    """Inside, ``generate`` refuses what does not read the whole context, and it alone, in its first forward pass.

    Raises:
        GacError: there is a press around the model already; inside, of options that are refused.
    """
    changed: Any = model
    if "generate" in vars(model):
        raise GacError("a press within a press", "one press for a model", "Leave the first one before the second.")
    generate = changed.generate

    @wraps(generate)
    def checked(*args: Any, **options: Any) -> Any:
        named = signature(generate).bind(*args, **options).arguments
        config, _ = changed._prepare_generation_config(named.get("generation_config"), **named.get("kwargs", {}))
        _check(config, named.get("assistant_model"), named.get("custom_generate"))
        return generate(*args, **options)

    changed.generate, changed.init_continuous_batching = checked, _refuse_batching
    try:
        yield
    finally:
        del changed.generate, changed.init_continuous_batching


def _check(config: GenerationConfig, assistant: Any, custom: Any) -> None:
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
    raise GacError(
        "continuous batching with a press", "a DynamicCache, from which tokens can be taken", "Use generate instead."
    )
