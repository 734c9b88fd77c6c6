"""GAC's own checkpoints, whose plan says every form and dim."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from gac.checkpoint.load import read_plan
from gac.forms import form_named
from gac.forms.base import Place
from gac.operations import Operation
from gac.plan import WeightChoice
from gac.repairs.shared_dims import Block, SharedDim, run_of
from gac.repairs.weight_files import Source


def planned_blocks(source: Source) -> Iterator[Block]:
    """The weights that are not dense; those of one site that are shorter on sides that meet share a shared dim."""
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
        for place in _places(one)
        if place.tensor in source.tensors or not place.tensor.endswith(".bias")
    )
    for place in places:
        stored = source.tensors.get(place.tensor)
        if stored is None or len(stored.shape) <= place.axis or stored.shape[place.axis] != place.ends[-1]:
            found = "missing" if stored is None else f"of shape {stored.shape}"
            planned = f"{place.ends[-1]} along axis {place.axis}, as plan.json says"
            raise source.contradiction(f"{place.tensor} is {found}", planned)
    runs = tuple(run_of(name, at) for one in choices for at in _operations(one))
    return Block((SharedDim(name, choices[0].dim, places, most),), runs)


def _operations(choice: WeightChoice) -> list[Callable[[int], Operation]]:
    """What runs the weight at a dim: the form as a whole where it is timed so, else each of its GEMMs."""
    form, weight = form_named(choice.form), choice.weight
    if form.timed:
        return [lambda dim: form.operation(weight, dim, 1)]

    def gemm(at: int) -> Callable[[int], Operation]:
        return lambda dim: form.gemms(weight, dim, 1)[at]

    return [gemm(at) for at in range(len(form.gemms(weight, 1, 1)))]


def _places(choice: WeightChoice) -> Iterator[Place]:
    """Where the dim lies, by the tensors' names in the checkpoint."""
    for place in form_named(choice.form).places(choice.weight, choice.dim):
        yield replace(place, tensor=f"{choice.name}.{place.tensor}")
