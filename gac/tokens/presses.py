"""The presses of kvpress that accept a number of tokens for each layer."""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from gac.core.errors import GacError, did_you_mean, first_line
from gac.tokens.attending import Prefill

RATIO = "compression_ratio"
VERSION = "0.5.5"
INSTALL = f"pip install --no-deps kvpress=={VERSION} 'cachetools<6' 'fire<0.7' termcolor six"
Options = dict[str, bool | int | float | str]


def kvpress() -> Any:
    """Import the package.

    Raises:
        GacError: it cannot be imported.
    """
    try:
        import kvpress
    except ImportError as failure:
        raise GacError(
            f"kvpress cannot be imported ({first_line(failure)})",
            f"kvpress {VERSION}, which runs here although its metadata asks for transformers below 5.3",
            f"Install it without its dependencies, which would replace transformers: {INSTALL}",
        ) from failure
    return kvpress


def known_presses() -> dict[str, type]:
    """The presses that can be named: each scores tokens, keeps the best, and needs nothing but a ratio."""
    package = kvpress()
    kinds = [getattr(package, name) for name in sorted(package.__all__)]
    usable = [kind for kind in kinds if isinstance(kind, type) and _why_unusable(kind) is None]
    return {_plain(kind.__name__): kind for kind in usable if not _needs_more(kind) and kind is not package.ScorerPress}


def _needs_more(kind: type) -> bool:
    """True if it has required arguments, or learns from the model or a download first."""
    base = kvpress().BasePress
    arguments = inspect.signature(kind).parameters.values()
    learns = kind.post_init_from_model is not base.post_init_from_model  # type: ignore[attr-defined]
    return learns or any(argument.default is argument.empty for argument in arguments)


def _why_unusable(kind: type) -> str | None:
    package = kvpress()
    if not issubclass(kind, package.ScorerPress):
        return "which has no scores by which the best tokens of a layer are kept"
    if kind.compress is not package.ScorerPress.compress:  # type: ignore[attr-defined]
        return "which decides by itself how many tokens a layer keeps"
    return None


def press_of(press: Any, options: Mapping[str, Any] | None = None) -> tuple[Any, str, Options]:
    """A press, its name in plans, and its parameters without the ratio.

    Args:
        press: a name, in any capitals and with any underscores and hyphens; or a press of kvpress.
        options: its parameters, with a name.

    Raises:
        GacError: it is unknown, has no ratios by layer, or has parameters that no plan can hold.
    """
    known = known_presses()
    if isinstance(press, str):
        name = _plain(press)
        if name not in known:
            raise _unknown(press, known)
        try:
            press = known[name](**(options or {}))
        except (TypeError, AssertionError) as failure:
            problem = f"press {name} with {dict(options or {})} ({first_line(failure)})"
            raise GacError(problem, "its own parameters", "See the press in kvpress.") from failure
    kind, listed = type(press), f"one of {', '.join(known)}"
    name = _plain(kind.__name__)
    if reason := _why_unusable(kind):
        raise GacError(f"a {kind.__name__}, {reason}", listed, "Choose a press with a ratio for each layer.")
    if known.get(name) is not kind:
        raise GacError(f"a {kind.__name__}, which no plan can make again", listed, "Choose one of these.")
    stored = [field.name for field in fields(press) if field.init and field.name != RATIO and field.name[0] != "_"]
    values = {key: getattr(press, key) for key in stored if getattr(press, key) is not None}
    if wrong := next((key for key, value in values.items() if not isinstance(value, bool | int | float | str)), None):
        raise GacError(f"{name} with {wrong}={values[wrong]!r}", "numbers and strings", "Leave it at its default.")
    return press, name, values


def _plain(name: str) -> str:
    """``snapkv`` for ``SnapKVPress``, ``snap_kv`` and the like."""
    return name.removesuffix("Press").lower().replace("_", "").replace("-", "")


def _unknown(press: str, known: Mapping[str, type]) -> GacError:
    package, listed = kvpress(), f"one of {', '.join(known)}"
    kind = next((getattr(package, name) for name in package.__all__ if _plain(name) == _plain(press)), None)
    if kind is None:
        return GacError(f"press {press!r} is unknown", listed, did_you_mean(press, known, "Choose one of these."))
    reason = _why_unusable(kind) or "which needs more than a ratio to be made"
    return GacError(f"press {press!r}, {reason}", listed, "Choose a press with a ratio for each layer.")


def evicted(press: Any, prefill: Prefill, kept: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values that the press keeps of a layer: exactly ``kept`` tokens for each head.

    Raises:
        GacError: the press cannot score this layer or this context.
    """
    attention, _, hidden, cache, weights, arguments = prefill
    tokens = cache.keys.shape[2]
    if kept == tokens:
        return cache.keys, cache.values
    cutting = copy.copy(press)
    cutting.compression_ratio = 1 - (kept + 0.5) / tokens  # kvpress keeps floor(tokens * (1 - ratio))
    device = cache.keys.device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)  # some presses draw projections: the same ones each time, and no numbers of the caller
            keys, values = cutting.compress(attention, hidden, cache.keys, cache.values, weights, arguments)
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as failure:
        raise GacError(
            f"{type(press).__name__} fails on {tokens} tokens of layer {attention.layer_idx} ({first_line(failure)})",
            "a context and a model that the press can score",
            "Give a longer context, choose another press, or load the model with attn_implementation='eager'.",
        ) from failure
    assert keys.shape[2] == kept == values.shape[2], (keys.shape, kept)
    return keys, values
