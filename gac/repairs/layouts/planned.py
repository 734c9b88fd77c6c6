"""GAC's own checkpoints, whose plan says every form and dim."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from gac.checkpoint.load import read_plan
from gac.forms import Form, form_named
from gac.forms.grouped.spec import Grouped
from gac.operations import Operation
from gac.plan import WeightChoice
from gac.repairs.layouts.wrong import contradiction
from gac.repairs.seams import Block, Place, Run, Seam, ends, run_of
from gac.repairs.stored import Source


def planned_blocks(source: Source) -> Iterator[Block]:
    """The weights that are not dense; those of one site that are shorter on sides that meet share a seam."""
    for site in read_plan(source.directory).sites:
        shorter = [one for one in site.weights if form_named(one.form).shortens(one.weight)]
        if shorter:
            yield _block(source, site.site, shorter)
        for choice in site.weights:
            if choice not in shorter and form_named(choice.form).axis(choice.weight):
                yield _block(source, choice.name, [choice])


def _block(source: Source, name: str, choices: Sequence[WeightChoice]) -> Block:
    most = min(form_named(one.form).full(one.weight) for one in choices)
    places = tuple(
        place
        for one in choices
        for place in PLACES[form_named(one.form).kind](one)
        if place.tensor in source.tensors or not place.tensor.endswith(".bias")
    )
    for place in places:
        _check_stored(source, place)
    runs = tuple(run for one in choices for run in _runs(name, one))
    return Block((Seam(name, choices[0].dim, places, most),), runs)


def _check_stored(source: Source, place: Place) -> None:
    stored = source.tensors.get(place.tensor)
    if stored is None or len(stored.shape) <= place.axis or stored.shape[place.axis] != place.ends[-1]:
        found = "missing" if stored is None else f"of shape {stored.shape}"
        planned = f"{place.ends[-1]} along axis {place.axis}, as plan.json says"
        raise contradiction(source, f"{place.tensor} is {found}", planned)


def _runs(name: str, choice: WeightChoice) -> Iterator[Run]:
    form, weight = form_named(choice.form), choice.weight
    if form.timed:
        yield run_of(name, lambda dim: form.operation(weight, dim, 1))
        return
    for at in range(len(form.gemms(weight, 1, 1))):
        yield run_of(name, _gemm(form, choice, at))


def _gemm(form: Form, choice: WeightChoice, at: int) -> Callable[[int], Operation]:
    return lambda dim: form.gemms(choice.weight, dim, 1)[at]


def _low_rank(choice: WeightChoice) -> tuple[Place, ...]:
    return Place(f"{choice.name}.first.weight", 0, (choice.dim,)), Place(
        f"{choice.name}.second.weight", 1, (choice.dim,)
    )


def _grouped(choice: WeightChoice) -> tuple[Place, ...]:
    form = form_named(choice.form)
    assert isinstance(form, Grouped)
    first = Place(f"{choice.name}.first.weight", 0, ends(choice.dim, form.groups(choice.weight)))
    return first, Place(f"{choice.name}.second.weight", 2, (choice.dim,))


def _narrow(choice: WeightChoice) -> tuple[Place, ...]:
    return _shorter(choice, choice.neurons == "out", choice.blocks if choice.neurons == "out" else 1)


def _head_dim(choice: WeightChoice) -> tuple[Place, ...]:
    return _shorter(choice, choice.values == "out", choice.heads)


def _shorter(choice: WeightChoice, writes: bool, copies: int) -> tuple[Place, ...]:
    at = ends(choice.dim, copies)
    if not writes:
        return (Place(f"{choice.name}.weight", 1, at),)
    return Place(f"{choice.name}.weight", 0, at), Place(f"{choice.name}.bias", 0, at)


# Where a form's dim lies in the tensors of a weight; the bias where there is one.
PLACES: Mapping[str, Callable[[WeightChoice], tuple[Place, ...]]] = MappingProxyType(
    {"low_rank": _low_rank, "grouped": _grouped, "narrow": _narrow, "head_dim": _head_dim}
)
