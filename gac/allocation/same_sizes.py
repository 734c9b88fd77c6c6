"""Layers whose routed experts all make one choice: their candidates as one set, which the knapsack takes as one group.

Layers of one shape have the same candidates at the same costs, so that their loss curves are summed, and the best
common choices are those of one layer with the summed curves.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from gac.allocation.candidate_set import CandidateSet
from gac.allocation.latencies import UNKNOWN, unnamed
from gac.core.arrays import Floats, Ints
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.models.sites import Site
from gac.plan.plan import Candidate
from gac.plan.recipe import Space

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class JointSet(CandidateSet):
    """Candidates of several sites, each of which all of them take; losses and costs are of all.

    Attributes:
        each: the candidates of one site.
        losses: of each site, shape ``(n, sites)``.
        places: positions of the sites in the model.
    """

    each: CandidateSet
    losses: Floats
    places: tuple[int, ...]

    @classmethod
    def of(cls, each: CandidateSet, losses: Floats, places: tuple[int, ...]) -> Self:
        columns = {name: value for name, value in vars(each).items() if name not in ("site", "loss", "costs")}
        count = len(places)
        costs = np.where(each.costs == UNKNOWN, UNKNOWN, count * each.costs)
        site = f"{each.site} and {count - 1} more"
        return cls(site=site, loss=losses.sum(axis=1), costs=costs, **columns, each=each, losses=losses, places=places)

    def pick(self, rows: slice | Ints | NDArray[np.bool_]) -> Self:
        return replace(super().pick(rows), each=self.each.pick(rows), losses=self.losses[rows])

    def of_sites(self, row: int) -> tuple[Candidate, ...]:
        alike = self.each.candidate(row)
        return tuple(replace(alike, loss=loss) for loss in self.losses[row].tolist())


def without_names(site: Site) -> Site:
    """The site as all others of its shape are."""
    return replace(site, name=site.kind, layer=0, weights=tuple(map(unnamed, site.weights)))


def places_of(sites: Sequence[Site], space: Space) -> list[tuple[int, ...]]:
    """Return the positions of the sites of each choice: of one, or of all routed experts of a shape."""
    places = defaultdict[Hashable, list[int]](list)
    for place, site in enumerate(sites):
        joins = space.same_count and site.weights[0].is_routed
        places[without_names(site) if joins else place].append(place)
    return [*map(tuple, places.values())]


def candidate_sets(
    sites: Sequence[Site], curves: LossCurves, space: Space, build: Callable[[Site, LossCurves], CandidateSet]
) -> list[CandidateSet]:
    """Return the candidates of each choice; ``build`` makes those of a site from its curves."""
    sets = list[CandidateSet]()
    for places in places_of(sites, space):
        members = [sites[place] for place in places]
        if len(members) == 1:
            sets.append(build(members[0], curves))
            continue
        rows = build(members[0], _summed(members, curves))
        losses = np.stack([_losses(rows, site, curves) for site in members], axis=1)
        sets.append(JointSet.of(rows, losses, places))
    return sets


def in_model_order(sets: Iterable[CandidateSet], values: Iterable[Sequence[T]]) -> list[T]:
    """Return the values of all sites in model order, from those of the sites of each set."""
    joint, alone = dict[int, T](), list[T]()
    for rows, of_sites in zip(sets, values, strict=True):
        if isinstance(rows, JointSet):
            joint |= zip(rows.places, of_sites, strict=True)
        else:
            alone += of_sites
    others = iter(alone)
    return [joint[place] if place in joint else next(others) for place in range(len(joint) + len(alone))]


def _summed(sites: Sequence[Site], curves: LossCurves) -> LossCurves:
    """The curves of the first site, each the sum of those of all sites."""
    summed = {
        (form, scheme, weights[0].name): LossCurve(
            np.sum([curves.by_key[form, scheme, weight.name].loss for weight in weights], axis=0)
        )
        for weights in zip(*(site.weights for site in sites), strict=True)
        for form, scheme, name in curves.by_key
        if name == weights[0].name
    }
    return LossCurves(summed)


def _losses(rows: CandidateSet, site: Site, curves: LossCurves) -> Floats:
    loss = np.zeros(len(rows))
    for position, weight in enumerate(site.weights):
        forms, schemes, dims = (column[:, position] for column in (rows.forms, rows.schemes, rows.dims))
        for form, scheme in {*zip(forms.tolist(), schemes.tolist(), strict=True)}:
            if (curve := curves.by_key.get((form, scheme, weight.name))) is not None:
                taken = (forms == form) & (schemes == scheme)
                loss[taken] += curve.loss[dims[taken]]
    return loss
