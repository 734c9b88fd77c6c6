"""Which dims of which operators a choice moves: what one integer of a plan does to the GEMMs and to attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from gac.forms import Form, Shorter, form_named
from gac.forms.planned_sites import as_planned
from gac.models.sites import Site, short_names
from gac.models.weights import Weight

_FACTORS = ("first", "second")


@dataclass(frozen=True)
class Moved:
    """One axis of one operator, whose size is ``per_dim`` times the dim that is chosen.

    Attributes:
        weight: the weight's short name, with ``first`` or ``second`` for a factor of a pair; ``attention``, and
            ``cache`` for what the KV cache keeps of a token.
        operator: ``linear``, ``batched_gemm`` or ``sdpa``; None for the cache.
        axis: ``k`` or ``n`` of the GEMM ``x[m, k] @ W[n, k].T``, ``values`` of attention (the length of its value
            vectors); None for the cache.
        fixed: the operator's other axes but m, the number of tokens.
    """

    weight: str
    operator: str | None
    axis: str | None
    per_dim: int
    fixed: dict[str, int]


@dataclass(frozen=True)
class Choice:
    """One form of one kind of site.

    Attributes:
        kind: of the site; ``layers`` of the model have it with these shapes.
        largest: the largest dim that saves parameters; every dim from 1 to it can be chosen, in multiples of ``step``
            where dims are aligned (beside what the profile shows to be sound).
        moved: everything that the dim moves.
    """

    kind: str
    layers: int
    form: str
    largest: int
    step: int
    moved: tuple[Moved, ...]


def choices(sites: Sequence[Site], forms: Sequence[str]) -> tuple[Choice, ...]:
    """Every choice that the sites of a family offer, the same in all layers that have the same shapes.

    Args:
        sites: from the family.
        forms: which forms besides dense.

    Raises:
        PlanError: a form is unknown.
    """
    planned = _shortly_named(as_planned(sites, forms, fused=False))
    found: list[Choice] = []
    alike: dict[tuple[object, ...], list[Site]] = {}
    for site in planned:
        alike.setdefault((site.kind, *map(_shape, site.weights)), []).append(site)
    for members in alike.values():
        for name in dict.fromkeys(forms):
            found += _choices(members[0], len(members), form_named(name))
    return tuple(found)


def _shortly_named(sites: Sequence[Site]) -> list[Site]:
    """The sites layer by layer, whose weights have their short names."""
    found = []
    for _, layer in groupby(sorted(sites, key=lambda site: site.layer), key=lambda site: site.layer):
        members = list(layer)
        called = short_names([weight.name for site in members for weight in site.weights])
        for site in members:
            weights = tuple(replace(weight, name=called[weight.name]) for weight in site.weights)
            found.append(replace(site, weights=weights))
    return found


def _shape(weight: Weight) -> tuple[int, int, int]:
    return weight.out_features, weight.in_features, weight.heads


def _choices(site: Site, layers: int, form: Form) -> list[Choice]:
    """One choice for all weights that the form takes together, or one for each weight that it takes by itself."""
    taken = [site.weights[at] for at in site.taken_by(form)]
    if taken:
        return [_choice(site.kind, layers, form, taken)]
    if isinstance(form, Shorter) or form.axis(site.weights[0]) is None:
        return []
    return [_choice(weight.name, layers, form, [weight]) for weight in site.weights if form.takes(weight)]


def _choice(kind: str, layers: int, form: Form, weights: Sequence[Weight]) -> Choice:
    moved = [one for weight in weights for one in (*_of_gemms(form, weight), *_of_attention(form, weight))]
    largest = min(form.largest_useful(weight) for weight in weights)
    return Choice(kind, layers, form.name, largest, form.step, tuple(moved))


def _of_gemms(form: Form, weight: Weight) -> list[Moved]:
    """The axes that differ between one dim and the next."""
    found = []
    pairs = list(zip(form.gemms(weight, 1, 1), form.gemms(weight, 2, 1), strict=True))
    for factor, (at_one, at_two) in zip(_FACTORS, pairs, strict=False):
        name = weight.name if len(pairs) == 1 else f"{weight.name}.{factor}"
        one, two = at_one.axes, at_two.axes
        fixed = {axis: size for axis, size in one.items() if axis != "m" and two[axis] == size}
        found += [
            Moved(name, at_one.operator, axis, two[axis] - one[axis], fixed) for axis in one if two[axis] != one[axis]
        ]
    return found


def _of_attention(form: Form, weight: Weight) -> list[Moved]:
    """What shorter value vectors change besides the GEMMs."""
    per_dim = form.cached(weight, 2) - form.cached(weight, 1)
    if not per_dim:
        return []
    cache = Moved("cache", None, None, per_dim, {})
    if not form.shortens(weight):
        return [cache]
    return [Moved("attention", "sdpa", "values", per_dim // weight.heads, {"kv": weight.heads}), cache]
