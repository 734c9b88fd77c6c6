"""The presses of kvpress that accept a number of tokens for each layer."""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from gac.core.errors import GacError, did_you_mean, first_line
from gac_extensions.tokens.attending import Prefill

RATIO = "compression_ratio"
VERSION = "0.5.5"
INSTALL = f"pip install --no-deps kvpress=={VERSION} 'cachetools<6' 'fire<0.7' termcolor six"
Options = dict[str, bool | int | float | str]


def kvpress() -> Any:
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
    return {name: kind for name, (kind, refusal) in _presses().items() if not refusal}


def _presses() -> dict[str, tuple[type, str]]:
    """Every press of kvpress by its plain name, with the reason why no plan can name it, if there is one."""
    package = kvpress()
    kinds = [getattr(package, name) for name in sorted(package.__all__)]
    return {_plain(kind.__name__): (kind, _refusal(kind)) for kind in kinds if isinstance(kind, type)}


def _refusal(kind: Any) -> str:
    package = kvpress()
    if not issubclass(kind, package.ScorerPress):
        return "which has no scores by which the best tokens of a layer are kept"
    if kind.compress is not package.ScorerPress.compress:
        return "which decides by itself how many tokens a layer keeps"
    arguments = inspect.signature(kind).parameters.values()
    learns = kind.post_init_from_model is not package.BasePress.post_init_from_model  # from the model or a download
    if learns or kind is package.ScorerPress or any(argument.default is argument.empty for argument in arguments):
        return "which needs more than a ratio to be made"
    return ""


def press_of(press: Any, options: Mapping[str, Any] | None = None) -> tuple[Any, str, Options]:
    """A press, its name in plans, and its parameters without the ratio.

    ``press`` is a name, in any capitals and with any underscores and hyphens, with ``options``; or a press of kvpress.
    A GacError says if it is unknown, has no ratios by layer, or has parameters that no plan can hold.
    """
    presses = _presses()
    known = {name: kind for name, (kind, refusal) in presses.items() if not refusal}
    kind, listed = type(press), f"one of {', '.join(known)}"
    if by_name := isinstance(press, str):
        if _plain(press) not in presses:
            raise GacError(f"press {press!r} is unknown", listed, did_you_mean(press, known, "Choose one of these."))
        kind, _ = presses[_plain(press)]
    if refusal := _refusal(kind):
        shown = f"press {press!r}" if by_name else f"a {kind.__name__}"
        raise GacError(f"{shown}, {refusal}", listed, "Choose a press with a ratio for each layer.")
    name = _plain(kind.__name__)
    if known.get(name) is not kind:
        raise GacError(f"a {kind.__name__}, which no plan can make again", listed, "Choose one of these.")
    if by_name:
        try:
            press = kind(**(options or {}))
        except (TypeError, AssertionError) as failure:
            problem = f"press {name} with {dict(options or {})} ({first_line(failure)})"
            raise GacError(problem, "its own parameters", "See the press in kvpress.") from failure
    stored = [field.name for field in fields(press) if field.init and field.name != RATIO and field.name[0] != "_"]
    values = {key: getattr(press, key) for key in stored if getattr(press, key) is not None}
    if wrong := next((key for key, value in values.items() if not isinstance(value, bool | int | float | str)), None):
        raise GacError(f"{name} with {wrong}={values[wrong]!r}", "numbers and strings", "Leave it at its default.")
    return press, name, values


def _plain(name: str) -> str:
    """``snapkv`` for ``SnapKVPress``, ``snap_kv`` and the like."""
    return name.removesuffix("Press").lower().replace("_", "").replace("-", "")


def evicted(press: Any, prefill: Prefill, kept: int) -> tuple[Tensor, Tensor]:
    """The keys and values that the press keeps of a layer, ``kept`` tokens for each head; a GacError if it fails."""
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
