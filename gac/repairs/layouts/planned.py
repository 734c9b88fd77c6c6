"""GAC's own checkpoints: their plan states every form and dim, and is recounted after padding."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gac.checkpoint.files import read_plan
from gac.core.errors import CheckpointError
from gac.forms import form_named
from gac.forms.base import Place
from gac.plan.costs import COSTS
from gac.plan.plan import Limit, Plan, SiteChoice, WeightChoice, counted
from gac.repairs.dims import Block, Dims, Run, SharedDim, run_of
from gac.repairs.weight_files import Source
from gac.schemes import scheme_named


def planned_blocks(source: Source) -> Iterator[Block]:
    """The weights that are not dense; weights of one site whose shortened sides meet share a dim.

    The width that the forms of a site are named after (``narrow_pair:104``) stays.

    Raises:
        CheckpointError: weights are quantised, so that no zeros can be put between numbers, or differ from the plan.
    """
    plan = read_plan(source.directory)
    schemes = {*(choice.scheme for choice in plan.weights), plan.recipe.space.head}
    if stored := sorted(name for name in schemes if scheme_named(name).storage):
        problem, remedy = (
            f"{source.directory} has weights in {', '.join(stored)}",
            "Allocate with --align, and compress",
        )
        raise CheckpointError(problem, "weights in 16 or 32 bits", f"{remedy} again.")
    for site in plan.sites:
        names_a_form = any(form_named(choice.form).parent_form_name for choice in site.weights)
        sharing: dict[str, list[WeightChoice]] = {}
        for choice in site.weights:
            if form_named(choice.form).latency.axis(choice.weight):
                sharing.setdefault(_owner(site, choice), []).append(choice)
        for name, choices in sharing.items():
            if not (names_a_form and name == site.site):
                yield _block(source, name, choices)


def _owner(site: SiteChoice, choice: WeightChoice) -> str:
    return site.site if form_named(choice.form).shortens(choice.weight) else choice.name


def _block(source: Source, name: str, choices: Sequence[WeightChoice]) -> Block:
    most = min(form_named(choice.form).full(choice.weight) for choice in choices)
    places = stored_places(source, choices, "as plan.json says")
    shared = SharedDim(name, choices[0].dim, places, most, form=choices[0].form)
    return Block((shared,), () if shared.fixed else tuple(run for choice in choices for run in _runs(name, choice)))


def _runs(name: str, choice: WeightChoice) -> list[Run]:
    form, weight = form_named(choice.form), choice.weight
    sized = [
        (form.latency.operation(weight, dim, 1),) if form.latency.timed else form.latency.gemms(weight, dim, 1)
        for dim in (1, 2)
    ]
    return [run_of(name, first, second) for first, second in zip(*sized, strict=True)]


def stored_places(source: Source, choices: Iterable[WeightChoice], reason: str) -> tuple[Place, ...]:
    """The places of the weights' dims in the tensors.

    Args:
        reason: where the expected length comes from, for an error.

    Raises:
        CheckpointError: a tensor is missing, or has another length.
    """
    places = [
        replace(place, tensor=f"{choice.name}.{place.tensor}")
        for choice in choices
        for place in form_named(choice.form).places(choice.weight, choice.dim)
    ]
    places = [place for place in places if place.tensor in source.tensors or not place.tensor.endswith(".bias")]
    for place in places:
        stored = source.tensors.get(place.tensor)
        if stored is None or stored.ndim <= place.axis or stored.shape[place.axis] != place.ends[-1]:
            state = "missing" if stored is None else f"of shape {tuple(stored.shape)}"
            expected = f"{place.ends[-1]} along axis {place.axis}, {reason}"
            raise source.contradiction(f"{place.tensor} is {state}", expected)
    return tuple(places)


def padded_plan(plan: Plan, dims: Dims) -> Plan:
    """The plan with new dims, recounted.

    Zeros change no output, so the loss stays. The proof that no choice within the budget loses less is void. Latencies
    and the alternatives of the sites are dropped, since they belong to other dims.

    Args:
        dims: by the name of the weight, or of the site that is shortened as a whole.
    """
    sites = tuple(_padded_site(site, dims) for site in plan.sites)
    weights = [weight for site in sites for weight in site.weights]
    recipe, proof = plan.recipe, plan.certificate
    limits = [pair for pair in zip(plan.limits, proof.multipliers, strict=True) if pair[0].column in COSTS]
    return replace(
        plan,
        recipe=replace(
            recipe, deployment=replace(recipe.deployment, workloads=()), limits=replace(recipe.limits, latency={})
        ),
        sites=sites,
        limits=tuple(_recounted(limit, weights) for limit, _ in limits),
        certificate=replace(
            proof,
            status="feasible",
            method=f"{proof.method}; zero-padded by gac repair",
            multipliers=tuple(price for _, price in limits),
        ),
        workloads=(),
    )


def _recounted(limit: Limit, weights: Sequence[WeightChoice]) -> Limit:
    used, _ = counted(weights, limit.column)
    return replace(limit, used=used, over=max(0, used - limit.limit))


def _padded_site(site: SiteChoice, dims: Dims) -> SiteChoice:
    weights = tuple(replace(choice, dim=dims.get(_owner(site, choice), choice.dim)) for choice in site.weights)
    params = sum(choice.params for choice in weights)
    return replace(site, weights=weights, params=params, latency_ns=(), alternatives=())
