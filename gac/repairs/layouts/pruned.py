"""Pruned MLPs, shorter values of latent attention, and attentions with fewer heads.

Vectors that end in zeros give the same outputs. LLM-Pruner leaves a number of neurons for each layer, and a number of
whole key-value groups, of heads of the same length: these need no padding, and become GAC's form ``heads``. The value
vectors of latent attention (DeepSeek-V2's MLA) are rows of kv_b_proj and columns of o_proj. Queries and keys stay:
their length scales the softmax. So do the latents, of which a norm takes the mean square.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from transformers import CONFIG_MAPPING

from gac.core.errors import CheckpointError, ModelError, PlanError
from gac.forms import Form, form_named
from gac.forms.base import Place, ends
from gac.forms.planned_sites import as_planned, check_forms_fit
from gac.models.families import Family, family_of
from gac.models.loading import UNREADABLE
from gac.models.sites import Site, Weight, short_names
from gac.plan.plan import WeightChoice
from gac.repairs.dims import Run, SharedDim, stored_places
from gac.repairs.weight_files import Source

# The prefixes that compressors give the model_type of the architecture that they compressed.
PREFIXES = ("asvd_", "palu")


@dataclass(frozen=True)
class DenseModel:
    """The dense model, from the config of the compressed one; empty if its architecture is not supported."""

    family: Family | None = None
    config: Any = None
    sites: tuple[Site, ...] = ()

    @cached_property
    def weights(self) -> Mapping[str, Weight]:
        return {weight.name: weight for site in self.sites for weight in site.weights}


def dense_model(config: Mapping[str, Any]) -> DenseModel:
    """Read ``config.json``; raises CheckpointError if it is invalid for its architecture."""
    architecture = str(config.get("model_type"))
    for prefix in PREFIXES:
        architecture = architecture.removeprefix(prefix)
    if architecture not in CONFIG_MAPPING:
        return DenseModel()
    try:
        dense: Any = CONFIG_MAPPING[architecture].from_dict(dict(config) | {"model_type": architecture})
        family = family_of(dense)
        return DenseModel(family, dense, family.sites(dense))
    except ModelError:
        return DenseModel()
    except UNREADABLE as failure:
        reason = " ".join(str(failure).split()).rstrip(".")
        problem = f"config.json is no config of a {architecture} model: {reason}"
        raise CheckpointError(problem, "its own config", "Copy it again.") from failure


# --- latent attention -----------------------------------------------------------------------------------------------

KV_B, OUTPUT, STATED = ".kv_b_proj.weight", ".o_proj.weight", "v_head_dim"
_SIZES = ("num_attention_heads", "qk_nope_head_dim", STATED)


def value_heads(source: Source, dense: DenseModel) -> Iterator[SharedDim]:
    """The value vectors of every layer, all of the length that the config states."""
    sizes = [size for name in _SIZES if isinstance(size := source.config.get(name), int)]
    if len(sizes) < len(_SIZES):
        return
    heads, keys, values = sizes
    for tensor in source.tensors:
        if tensor.endswith(KV_B):
            name = tensor.removesuffix(KV_B)
            kv_b, output = source.matrix(tensor), name + OUTPUT
            shape = source.matrix(output) if output in source.tensors else None
            if shape is None or kv_b[0] != heads * (keys + values) or shape[1] != heads * values:
                raise source.contradiction(
                    f"{tensor} {kv_b} and {output} {shape or 'missing'}",
                    f"{heads * (keys + values)} rows and {heads * values} columns, as config.json states",
                )
            places = Place(tensor, 0, ends(keys + values, heads)), Place(output, 1, ends(values, heads))
            first = Run("linear", {"k": kv_b[1]}, "n", {name: heads}, rest=heads * keys)
            second = Run("linear", {"n": shape[0]}, "k", {name: heads})
            yield SharedDim(name, values, places, (first, second), stated=(STATED,))


# --- MLPs -----------------------------------------------------------------------------------------------------------


def mlp_widths(source: Source, dense: DenseModel) -> list[SharedDim]:
    """The MLPs with dense weights. The config's number of neurons changes too, if it is that of all layers."""
    family = dense.family
    if family is None:
        return []
    layers = dense.config.num_hidden_layers
    prefixes = [f"{family.layers}.{layer}." for layer in range(layers)]
    widths = [width for prefix in prefixes for width in _mlp(source, dense.config.hidden_size, family, prefix)]
    if len(widths) < layers or {width.dim for width in widths} != {source.config.get(family.neurons)}:
        return widths
    return [replace(width, stated=(family.neurons,)) for width in widths]


def _mlp(source: Source, hidden: int, family: Family, prefix: str) -> Iterator[SharedDim]:
    ups, down = [f"{prefix}{name}.weight" for name in family.up], f"{prefix}{family.down}.weight"
    if not all(name in source.tensors for name in (*ups, down)):
        return  # they are factored
    shapes = [source.matrix(name) for name in (*ups, down)]
    flip = not _linear(shapes, hidden) and _linear([shape[::-1] for shape in shapes], hidden)  # (in, out): GPT-2
    *above, below = [shape[::-1] if flip else shape for shape in shapes]
    width = below[1]
    if below[0] != hidden or any(shape != (family.blocks * width, hidden) for shape in above):
        named = zip((*ups, down), shapes, strict=True)
        problem = ", ".join(f"{name} {rows} x {columns}" for name, (rows, columns) in named)
        raise source.contradiction(problem, f"weights that share their neurons, and a hidden size of {hidden}")
    name = down.removesuffix(".weight").rpartition(".")[0]
    biases = [bias for bias in (up.removesuffix("weight") + "bias" for up in ups) if bias in source.tensors]
    places = (
        *(Place(up, int(flip), ends(width, family.blocks)) for up in ups),
        *(Place(bias, 0, ends(width, family.blocks)) for bias in biases),
        Place(down, 1 - int(flip), (width,)),
    )
    first = Run("linear", {"k": hidden}, "n", {name: family.blocks})
    second = Run("linear", {"n": hidden}, "k", {name: 1})
    yield SharedDim(name, width, places, (*(first for _ in ups), second), form="narrow")


def _linear(shapes: list[tuple[int, int]], hidden: int) -> bool:
    """True if these are ``(out, in)`` shapes of an MLP of this hidden size."""
    *above, below = shapes
    return all(shape[1] == hidden for shape in above) and below[0] == hidden


# --- attentions -----------------------------------------------------------------------------------------------------

FORM = "heads"
_REMEDY = (
    "Prune the same whole groups in all of them, and let config.json state the hidden size, head_dim and numbers of "
    "heads from before."
)


def fewer_heads(source: Source, dense: DenseModel) -> Iterator[SharedDim]:
    """The attentions that are smaller than in the config."""
    attention = [weight for weight in dense.weights.values() if weight.neurons is None]
    smaller = [weight for weight in attention if _is_pruned(source, weight)]
    if not smaller:
        return
    try:
        check_forms_fit(dense.sites, [FORM], dense.config.model_type)
    except PlanError as failure:
        weight = smaller[0]
        problem = f"{weight.name} {_sized(_shape(source, weight))} would need the {failure.given}"
        expected = f"{weight.out_features} x {weight.in_features}, all heads, as config.json states"
        raise source.contradiction(problem, expected, "Prune its MLPs alone.") from failure
    for site in as_planned(dense.sites, [FORM], fused=False):
        if any(weight in smaller for weight in site.weights):
            yield _key_value_heads(source, site)


def _shape(source: Source, weight: Weight) -> tuple[int, int] | None:
    name = f"{weight.name}.weight"
    return source.matrix(name) if name in source.tensors else None


def _sized(shape: tuple[int, int] | None) -> str:
    return " x ".join(map(str, shape)) if shape else "missing"


def _is_pruned(source: Source, weight: Weight) -> bool:
    shape = _shape(source, weight)  # the dense weight may be stored transposed (GPT-2)
    return shape is not None and sorted(shape) != sorted((weight.out_features, weight.in_features))


def _key_value_heads(source: Source, site: Site) -> SharedDim:
    form = form_named(FORM)
    first, *others = [_groups(source, form, weight) for weight in site.weights]
    if first is None or any(groups != first for groups in others):
        raise source.contradiction(*_stored_and_expected(source, form, site), _REMEDY)
    choices = [WeightChoice(weight, FORM, first) for weight in site.weights]
    places = stored_places(source, choices, f"for {first} key-value heads, as the weights of {site.name} have")
    return SharedDim(site.name, first, places, form=FORM)


def _groups(source: Source, form: Form, weight: Weight) -> int | None:
    """Key-value heads of a weight; None if its shape fits no number of them."""
    counts = range(1, form.full(weight) + 1)
    return next((count for count in counts if _shape(source, weight) == _sides(form, weight, count)), None)


def _sides(form: Form, weight: Weight, count: int) -> tuple[int, int]:
    sizes = form.module(weight, count).sizes
    return sizes["out_features"], sizes["in_features"]


def _stored_and_expected(source: Source, form: Form, site: Site) -> tuple[str, str]:
    """The stored shapes, and those that h groups of heads would have."""
    names, stored, expected = short_names([weight.name for weight in site.weights]), [], []
    for weight in site.weights:
        stored.append(f"{names[weight.name]} {_sized(_shape(source, weight))}")
        sides = zip(_sides(form, weight, 1), _sides(form, weight, 2), strict=True)
        expected.append(" x ".join(f"{size}" if size == double else f"{size}*h" for size, double in sides))
    limit = f"with one whole h from 1 to {form.full(site.weights[0])}, the key-value heads that it keeps"
    return f"{site.weights[0].input_group} has {', '.join(stored)}", f"{', '.join(expected)} {limit}"
