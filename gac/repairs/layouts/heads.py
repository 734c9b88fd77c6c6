"""Attentions with fewer heads, as LLM-Pruner leaves them: whole key-value groups, a number of them for each layer.

The config states how many there were. Heads keep their length, so there is nothing to pad: they are carried as they
are, by the form ``heads``, which says what no stock config can.
"""

from collections.abc import Iterator

from gac.core.errors import PlanError
from gac.forms import Form, form_named
from gac.forms.planned_sites import as_planned, check_forms_fit
from gac.models.sites import Site, Weight, short_names
from gac.plan.plan import WeightChoice
from gac.repairs.dense import DenseModel
from gac.repairs.layouts.planned import stored_places
from gac.repairs.shared_dims import Block, SharedDim
from gac.repairs.weight_files import Source

FORM = "heads"
_REMEDY = (
    "Prune the same whole groups in all of them, and let config.json state the hidden size, head_dim and numbers of "
    "heads from before."
)


def fewer_heads(source: Source, dense: DenseModel) -> Iterator[Block]:
    """The attentions that are smaller than the config says.

    Raises:
        CheckpointError: their weights do not agree, or this architecture can have no fewer heads.
    """
    attention = (weight for weight in dense.weights.values() if weight.neurons is None)
    smaller = {weight.name: weight for weight in attention if _differs(source, weight)}
    if not smaller:
        return
    _check_architecture(source, dense, next(iter(smaller.values())))
    for site in as_planned(dense.sites, [FORM], fused=False):
        if any(weight.name in smaller for weight in site.weights):
            yield _block(source, site)


def _differs(source: Source, weight: Weight) -> bool:
    """Whether it is stored whole, and in another shape than the dense weight's, which may be transposed (GPT-2)."""
    shape = _shape(source, weight)
    return shape is not None and sorted(shape) != sorted((weight.out_features, weight.in_features))


def _shape(source: Source, weight: Weight) -> tuple[int, int] | None:
    name = f"{weight.name}.weight"
    return source.matrix(name) if name in source.tensors else None


def _check_architecture(source: Source, dense: DenseModel, weight: Weight) -> None:
    try:
        check_forms_fit(dense.sites, [FORM], dense.config.model_type)
    except PlanError as failure:
        rows, columns = source.matrix(f"{weight.name}.weight")
        raise source.contradiction(
            f"{weight.name} {rows} x {columns} would need the {failure.given}",
            f"{weight.out_features} x {weight.in_features}, all heads, as config.json states",
            "Prune its MLPs alone.",
        ) from failure


def _block(source: Source, site: Site) -> Block:
    form = form_named(FORM)
    counts = {_count(source, form, weight) for weight in site.weights}
    kept = next(iter(counts))
    if len(counts) > 1 or kept is None:
        raise source.contradiction(_given(source, site), _expected(form, site), _REMEDY)
    choices = [WeightChoice(weight, FORM, kept) for weight in site.weights]
    places = stored_places(source, choices, f"for {kept} key-value heads, as the weights of {site.name} have")
    return Block((SharedDim(site.name, kept, places, form=FORM),), ())


def _count(source: Source, form: Form, weight: Weight) -> int | None:
    """How many groups of heads a weight has; None where that is no whole number from 1 to those of the config."""
    for count in range(1, form.full(weight) + 1):
        if _shape(source, weight) == _sides(form, weight, count):
            return count
    return None


def _sides(form: Form, weight: Weight, count: int) -> tuple[int, int]:
    sizes = form.module(weight, count).sizes
    return sizes["out_features"], sizes["in_features"]


def _given(source: Source, site: Site) -> str:
    called = short_names([weight.name for weight in site.weights])
    shapes = ((called[weight.name], _shape(source, weight)) for weight in site.weights)
    told = (f"{name} {f'{shape[0]} x {shape[1]}' if shape else 'missing'}" for name, shape in shapes)
    return f"{site.weights[0].input_group} has {', '.join(told)}"


def _expected(form: Form, site: Site) -> str:
    """The shapes that h groups of heads have."""
    told = []
    for weight in site.weights:
        one, two = (_sides(form, weight, count) for count in (1, 2))
        told.append(" x ".join(f"{a}" if a == b else f"{a}*h" for a, b in zip(one, two, strict=True)))
    most = form.full(site.weights[0])
    return f"{', '.join(told)} with one whole h from 1 to {most}, the key-value heads that it keeps"
