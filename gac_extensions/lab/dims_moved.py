"""The dims of operators that a choice moves: the effect of one integer of a plan on the GEMMs and on attention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from gac.core.display import Table
from gac.forms import Form, Shorter, form_named
from gac.forms.planned_sites import as_planned
from gac.models.attentions import heads_of
from gac.models.families import Family
from gac.models.sites import Site, Weight
from gac.plan.layers import short_names_of
from gac_extensions.tokens.layers import cut_layers, finds_attentions, not_pressed

TOKENS = "tokens"
"""Name of the number of cached tokens among the forms, though it is a dim of the cache and of no weight."""

_TOKEN = "t"
_LEGEND = (
    "a GEMM is x[M, K] @ W[N, K].T; M is the number of tokens that run at once, which no choice moves\n"
    "d is a multiple of 8 where dims are aligned, and every dim what the profile shows to be sound"
)
_LEGEND_TOKENS = (
    "t is how many tokens of a context a layer keeps in its cache (gac tokens); scores are Q @ K.T, and\n"
    "mixed values P @ V, of each key-value head of each text; attention runs both as one"
)


@dataclass(frozen=True)
class Moved:
    """One axis of one operator, whose size is ``per_dim / dims`` times the dim that is chosen."""

    weight: str  # short name, ``first`` or ``second`` for a factor; ``attention``; ``cache`` (of a token)
    operator: str | None  # ``linear``, ``batched_gemm``, ``sdpa`` or attention over latents; None for the cache
    # ``k`` or ``n`` of a GEMM; of attention ``values`` (the length of a value), ``heads`` (key-value heads), ``t``
    # (cached tokens), over latents ``k`` or ``v`` (the rank of either); None for the cache
    axis: str | None
    per_dim: int
    fixed: dict[str, int]  # the operator's other axes but m, the number of tokens
    dims: int = 1  # more for a cache of few bits, of which several numbers fill a word


@dataclass(frozen=True)
class Choice:
    """One form of one kind of site, or the tokens that a cache keeps."""

    kind: str  # of the site, or ``KV cache``
    layers: int  # so many have it with these shapes
    form: str
    largest: int | None  # dim that saves parameters, every one from 1 on can be chosen; None: a context's tokens
    step: int  # of the dims, where they are aligned (beside what the profile shows to be sound)
    moved: tuple[Moved, ...]  # everything that the dim moves


def choices(sites: Sequence[Site], forms: Sequence[str]) -> tuple[Choice, ...]:
    """Every choice besides dense that the sites of a family offer, the same in all layers that have the same shapes."""
    alike: dict[str, list[Choice]] = {}
    short = short_names_of(sites)
    named = list(map(form_named, forms))
    for site in as_planned(sites, forms, fused=False):
        variants = (variant for form in named for weight in site.weights for variant in form.variants(weight))
        for form in {form.name: form for form in variants}.values():
            for weights in _taken(site, form):
                kind = site.kind if len(weights) > 1 else short[weights[0].name]
                largest = min(form.max_useful_dim(weight) for weight in weights)
                moved = tuple(axis for weight in weights for axis in _moved(form, weight, short[weight.name]))
                choice = Choice(kind, 1, form.name, largest, form.step, moved)
                alike.setdefault(repr(choice), []).append(choice)
    return tuple(replace(same[0], layers=len(same)) for same in alike.values())


def tokens_kept(family: Family, config: Any, step: int) -> Choice:
    """The tokens, in steps, that the cache of a layer without a sliding window keeps; a ModelError without a press."""
    if not finds_attentions(family):
        raise not_pressed(config.model_type)
    heads = heads_of(config)
    a_head = {"b": heads.cached}
    moved = (
        Moved("attention", "sdpa", "t", 1, {"h": heads.queries, "kv": heads.cached, "d": heads.length}),
        Moved("scores", "batched_gemm", "n", 1, a_head | {"k": heads.length}),
        Moved("mixed values", "batched_gemm", "k", 1, a_head | {"n": heads.length}),
        Moved("cache", None, None, heads.numbers, {}),
    )
    return Choice("KV cache", len(cut_layers(config)), TOKENS, None, step, moved)


def _taken(site: Site, form: Form) -> list[list[Weight]]:
    if taken := site.joint_weights(form):
        return [[site.weights[number] for number in taken]]
    if isinstance(form, Shorter):
        return []
    return [[weight] for weight in site.weights if form.latency.axis(weight) is not None and form.applies_to(weight)]


def _moved(form: Form, weight: Weight, name: str) -> Iterator[Moved]:
    """The axes that differ between one dim and the next, and the changes of attention and of the cache."""
    gemms = form.latency.gemms(weight, 1, 1), form.latency.gemms(weight, 2, 1)
    names = [name] if len(gemms[0]) == 1 else [f"{name}.first", f"{name}.second"]
    for gemm_name, first, second in zip(names, *gemms, strict=True):
        before, after = first.axes, second.axes
        fixed = {axis: size for axis, size in before.items() if axis != "m" and after[axis] == size}
        for axis in (axis for axis in before if after[axis] != before[axis]):
            yield Moved(gemm_name, first.operator, axis, after[axis] - before[axis], fixed)
    if rank := form.cache.axis(weight):
        yield Moved("attention", form.cache.attention(weight, 1, 1, 1).operator, rank, 1, {})
    dims = form.step if form.cache.bits else 1
    if per_dim := form.cache.numbers(weight, 1 + dims) - form.cache.numbers(weight, 1):
        if form.dim_counts_units and weight.values == "out":
            yield Moved("attention", "sdpa", "heads", weight.heads // form.full(weight), {})
        elif form.shortens(weight) and not form.dim_counts_units:
            yield Moved("attention", "sdpa", "values", per_dim // weight.heads, {"kv": weight.heads})
        shared = gcd(per_dim, dims)
        yield Moved("cache", None, None, per_dim // shared, {}, dims // shared)


# --- the table ------------------------------------------------------------------------------------------------------


def choices_table(choices: Sequence[Choice]) -> Table:
    rows, notes = [], _LEGEND
    for choice in choices:
        symbol = _TOKEN if choice.form == TOKENS else form_named(choice.form).symbol
        dims = f"{symbol} 1 to {choice.largest:,}" if choice.largest else f"{symbol} 0"
        if choice.largest is None:
            dims, notes = f"{symbol} in steps of {choice.step}", f"{_LEGEND}\n{_LEGEND_TOKENS}"
        moves = "\n".join(_words(moved, symbol) for moved in choice.moved)
        rows.append((choice.kind, str(choice.layers), choice.form, dims, moves))
    columns = [("site", "<"), ("layers", ">"), ("form", "<"), ("dim", "<"), ("moves", "<")]
    return Table(columns, rows, notes=notes)


def _words(moved: Moved, symbol: str) -> str:
    size = symbol if moved.per_dim == 1 else f"{moved.per_dim:,} {symbol}"
    if moved.axis is None and symbol == _TOKEN:
        return f"KV cache: {size} numbers of 16 bits"
    if moved.axis is None:
        return f"KV cache: {size}{f' / {moved.dims}' if moved.dims > 1 else ''} numbers of 16 bits a token"
    if moved.weight == "attention" and moved.operator != "sdpa":
        return f"attention: {'keys' if moved.axis == 'k' else 'values'} of rank {size}"
    fixed = ", ".join(f"{axis.upper()} = {length:,}" for axis, length in moved.fixed.items())
    if moved.axis == "t":
        return f"attention: {size} cached tokens ({fixed})"
    if moved.operator == "sdpa":
        return f"attention: value vectors of {size}" if moved.axis == "values" else f"attention: {size} key-value heads"
    return f"{moved.weight}: {moved.axis.upper()} = {size} ({fixed})"
