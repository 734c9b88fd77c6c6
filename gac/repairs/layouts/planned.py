"""GAC's own checkpoints: their plan says every form and dim, and is counted again once they are padded."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gac.checkpoint.files import read_plan
from gac.core.errors import CheckpointError
from gac.forms import form_named
from gac.forms.base import Place
from gac.plan.costs import COSTS
from gac.plan.plan import Limit, Plan, SiteChoice, WeightChoice, counted
from gac.repairs.shared_dims import Block, Dims, Run, SharedDim, run_of
from gac.repairs.weight_files import Source
from gac.schemes import scheme_named


def planned_blocks(source: Source) -> Iterator[Block]:
    """The weights that are not dense; where weights of one site are shorter on sides that meet, these share a dim.

    Dims that count heads or blocks are carried as they are.

    Where a form lies inside another, the other's dim stays: it is part of the names of the plan's forms.
    """
    plan = read_plan(source.directory)
    _check_plain(source, plan)
    for site in plan.sites:
        inside = any(form_named(one.form).parent_form_name for one in site.weights)
        sharing: dict[str, list[WeightChoice]] = {}
        for choice in site.weights:
            if form_named(choice.form).latency.axis(choice.weight):
                sharing.setdefault(_owner(site, choice), []).append(choice)
        for name, choices in sharing.items():
            if not (inside and name == site.site):
                yield _block(source, name, choices)


def _check_plain(source: Source, plan: Plan) -> None:
    """Zeros can be put between numbers only where these are stored one by one."""
    schemes = {*(one.scheme for one in plan.weights), plan.recipe.space.head}
    if stored := sorted(name for name in schemes if scheme_named(name).storage):
        raise CheckpointError(
            f"{source.directory} has weights in {', '.join(stored)}",
            "weights in 16 or 32 bits",
            "Allocate with --align, and compress again.",
        )


def _owner(site: SiteChoice, choice: WeightChoice) -> str:
    """The owner of the dim: the site where sides that meet are shortened, else the weight itself."""
    return site.site if form_named(choice.form).shortens(choice.weight) else choice.name


def _block(source: Source, name: str, choices: Sequence[WeightChoice]) -> Block:
    most = min(form_named(one.form).full(one.weight) for one in choices)
    places = stored_places(source, choices, "as plan.json says")
    shared = SharedDim(name, choices[0].dim, places, most, form=choices[0].form)
    runs = () if shared.carried else tuple(run for one in choices for run in _runs(name, one))
    return Block((shared,), runs)


def stored_places(source: Source, choices: Iterable[WeightChoice], said: str) -> tuple[Place, ...]:
    """Where the dims of some weights lie in the tensors.

    Args:
        said: what else says how long the tensors are there, as an error names it.

    Raises:
        CheckpointError: a tensor is missing, or not as long.
    """
    everywhere = [
        replace(place, tensor=f"{one.name}.{place.tensor}")
        for one in choices
        for place in form_named(one.form).places(one.weight, one.dim)
    ]
    places = tuple(one for one in everywhere if one.tensor in source.tensors or not one.tensor.endswith(".bias"))
    for place in places:
        stored = source.tensors.get(place.tensor)
        if stored is None or stored.ndim <= place.axis or stored.shape[place.axis] != place.ends[-1]:
            found = "missing" if stored is None else f"of shape {tuple(stored.shape)}"
            raise source.contradiction(
                f"{place.tensor} is {found}", f"{place.ends[-1]} along axis {place.axis}, {said}"
            )
    return places


def _runs(name: str, choice: WeightChoice) -> list[Run]:
    """What runs the weight: the form as a whole where it is timed so, else each of its GEMMs."""
    form, weight = form_named(choice.form), choice.weight
    sized = [
        (form.latency.operation(weight, dim, 1),) if form.latency.timed else form.latency.gemms(weight, dim, 1)
        for dim in (1, 2)
    ]
    return [run_of(name, one, two) for one, two in zip(*sized, strict=True)]


def padded_plan(plan: Plan, dims: Dims) -> Plan:
    """The plan with new dims, counted again in exact integers.

    The loss is as before, for zeros change no output. It is no longer proved that no choice within the budget loses
    less. The latencies and the alternatives of the sites are left out, for they belong to other dims.

    Args:
        dims: by the name of the weight, or of the site that is shorter as a whole.
    """
    sites = tuple(_padded_site(site, dims) for site in plan.sites)
    weights = [weight for site in sites for weight in site.weights]
    recipe, proof = plan.recipe, plan.certificate
    pairs = [(one, price) for one, price in zip(plan.limits, proof.multipliers, strict=True) if one.column in COSTS]
    return replace(
        plan,
        recipe=replace(
            recipe,
            deployment=replace(recipe.deployment, workloads=()),
            limits=replace(recipe.limits, latency={}),
        ),
        sites=sites,
        limits=tuple(_counted(one, weights) for one, _ in pairs),
        certificate=replace(
            proof,
            status="feasible",
            method=f"{proof.method}; zero-padded by gac repair",
            multipliers=tuple(price for _, price in pairs),
        ),
        workloads=(),
    )


def _counted(limit: Limit, weights: Sequence[WeightChoice]) -> Limit:
    used, _ = counted(weights, limit.column)
    return replace(limit, used=used, over=max(0, used - limit.limit))


def _padded_site(site: SiteChoice, dims: Dims) -> SiteChoice:
    weights = tuple(replace(one, dim=dims.get(_owner(site, one), one.dim)) for one in site.weights)
    params = sum(one.params for one in weights)
    return replace(site, weights=weights, params=params, latency_ns=(), alternatives=())
