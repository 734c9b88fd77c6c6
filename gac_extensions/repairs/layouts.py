"""The layouts that repair knows: each finds the shared dims of a checkpoint.

Factors: pairs as SVD-LLM and ASVD name them, and PaLU's groups of heads in k_proj and v_proj (arXiv 2407.21118), each
with a rank. ``VT (sum of ranks, in)`` of a weight computes the latents of all groups, one after the other;
``U.g (rows of a group, rank)`` maps those of group g to its heads. A pair has one group.

Pruned models: vectors that end in zeros give the same outputs. LLM-Pruner leaves a number of neurons for each layer,
and a number of key-value groups, of heads of the same length: these need no padding, and become GAC's form ``heads``.
The value vectors of latent attention (DeepSeek-V2's MLA) are rows of kv_b_proj and columns of o_proj. Queries and keys
stay: their length scales the softmax. So do the latents, of which a norm takes the mean square.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, count, takewhile
from types import MappingProxyType
from typing import Any

from transformers import CONFIG_MAPPING

from gac.core.errors import CheckpointError, ModelError, PlanError
from gac.forms import form_named
from gac.forms.base import Place, ends
from gac.forms.planned_sites import as_planned, check_forms_fit
from gac.models.families import Family, family_of
from gac.models.loading import UNREADABLE
from gac.models.sites import Site, Weight, short_names
from gac.plan.plan import WeightChoice
from gac_extensions.repairs.dims import Run, SharedDim, stored_places
from gac_extensions.repairs.weight_files import Source

PREFIXES = ("asvd_", "palu")  # that compressors give the model_type of the architecture that they compressed
FORM = "heads"


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


# --- factors --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """The names that a compressor gives the factors of a weight: A ``(sum of ranks, in)`` and B_g of every group g."""

    name: str
    second: str  # ending of the names of the B_g; ``{}`` stands for the group, if there are groups
    first: str  # ending of the name of A
    weights: tuple[str, ...] = ("{}",)  # possible names of the weight, with the part before these endings as ``{}``
    stated: str = ""  # the key of ``config.json`` with the rank, or those of the groups, by the weight's name


PEERS = {
    "pairs of SVD-LLM": Peer("SVD-LLM", "_u_proj.weight", "_v_proj.weight", weights=("{}_proj", "{}")),
    "pairs of ASVD": Peer("ASVD", ".ALinear.weight", ".BLinear.weight", stated="truncation_ranks"),
    "head groups of PaLU": Peer("PaLU", ".U.{}.weight", ".VT.weight", stated="head_wise_ranks"),
}


def factored(peer: Peer, source: Source, dense: DenseModel) -> Iterator[SharedDim]:
    grouped = "{}" in peer.second
    ending = peer.first if grouped else peer.second
    for stem in [tensor.removesuffix(ending) for tensor in source.tensors if tensor.endswith(ending)]:
        numbered = (stem + peer.second.format(group) for group in (count() if grouped else range(1)))
        first, seconds = stem + peer.first, list(takewhile(source.tensors.__contains__, numbered))
        if first not in source.tensors or not seconds:
            missing = first if seconds else stem + peer.second.format(0)
            raise source.contradiction(f"{stem} without {missing}", f"both factors, as {peer.name} stores them")
        names = [name.format(stem) for name in peer.weights]
        weight = next((dense.weights[name] for name in names if name in dense.weights), None)
        name = weight.name if weight else names[0]
        _check_product(source, weight, first, seconds)
        ranks = [source.tensors[second].shape[1] for second in seconds]
        rows, into = source.tensors[seconds[0]].shape[0], source.tensors[first].shape[1]
        path = _stated_path(source, peer, name, ranks if grouped else ranks[0])
        owners = [second.removesuffix(".weight") for second in seconds] if grouped else [name]
        latents = Run("linear", {"k": into}, "n", dict.fromkeys(owners, 1))
        for group, (owner, rank, end) in enumerate(zip(owners, ranks, accumulate(ranks), strict=True)):
            runs = [Run("linear", {"n": rows}, "k", {owner: 1})] if grouped else []
            if group == 0:
                runs.insert(0, latents if grouped else Run("low_rank", {"k": into, "n": rows}, "r", {owner: 1}))
            places = Place(seconds[group], 1, (rank,)), Place(first, 0, (end,))
            yield SharedDim(owner, rank, places, tuple(runs), stated=(*path, group) if path and grouped else path)


def _check_product(source: Source, weight: Weight | None, first: str, seconds: Sequence[str]) -> None:
    inner, *outer = (source.tensors[name].shape for name in (first, *seconds))
    multiply = (
        all(len(shape) == 2 for shape in (inner, *outer))
        and len({shape[0] for shape in outer}) == 1
        and sum(shape[1] for shape in outer) == inner[0]
        and (weight is None or (weight.out_features, weight.in_features) == (outer[0][0] * len(outer), inner[1]))
    )
    if not multiply:
        sizes = [f"{name} {_sized(source.tensors[name].shape)}" for name in (*seconds, first)]
        product = (
            f"{weight.out_features} x {weight.in_features}, the shape of {weight.name}" if weight else "one weight"
        )
        problem = f"{' and '.join(sizes[:-1])} times {sizes[-1]}"
        raise source.contradiction(problem, f"factors that multiply to {product}")


def _stated_path(source: Source, peer: Peer, name: str, stored: Any) -> tuple[str | int, ...]:
    ranks = source.config.get(peer.stated)
    if not isinstance(ranks, dict) or ranks.get(name) is None:
        return ()
    if ranks[name] != stored:
        raise source.contradiction(f"config.json states rank {ranks[name]} for {name}", f"{stored}, as stored")
    return peer.stated, name


# --- latent attention -----------------------------------------------------------------------------------------------


def value_heads(source: Source, dense: DenseModel) -> Iterator[SharedDim]:
    """The value vectors of every layer, all of the length that the config states."""
    names = ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
    sizes = [size for name in names if isinstance(size := source.config.get(name), int)]
    if len(sizes) < len(names):
        return
    heads, keys, values = sizes
    for tensor in source.tensors:
        if tensor.endswith(".kv_b_proj.weight"):
            name = tensor.removesuffix(".kv_b_proj.weight")
            kv_b, output = source.matrix(tensor), f"{name}.o_proj.weight"
            shape = source.matrix(output) if output in source.tensors else None
            if shape is None or kv_b[0] != heads * (keys + values) or shape[1] != heads * values:
                raise source.contradiction(
                    f"{tensor} {kv_b} and {output} {shape or 'missing'}",
                    f"{heads * (keys + values)} rows and {heads * values} columns, as config.json states",
                )
            places = Place(tensor, 0, ends(keys + values, heads)), Place(output, 1, ends(values, heads))
            first = Run("linear", {"k": kv_b[1]}, "n", {name: heads}, rest=heads * keys)
            second = Run("linear", {"n": shape[0]}, "k", {name: heads})
            yield SharedDim(name, values, places, (first, second), stated=("v_head_dim",))


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
        problem = ", ".join(f"{name} {_sized(shape)}" for name, shape in named)
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


def _sized(shape: Sequence[int] | None) -> str:
    return " x ".join(map(str, shape)) if shape else "missing"


# --- attentions -----------------------------------------------------------------------------------------------------


def fewer_heads(source: Source, dense: DenseModel) -> Iterator[SharedDim]:
    """The attentions that are smaller than in the config."""
    shapes = {
        weight.name: source.matrix(f"{weight.name}.weight") if f"{weight.name}.weight" in source.tensors else None
        for weight in dense.weights.values()
        if weight.neurons is None
    }
    smaller = [
        weight
        for weight in dense.weights.values()
        if (shape := shapes.get(weight.name))  # a dense weight may be stored transposed (GPT-2)
        and sorted(shape) != sorted((weight.out_features, weight.in_features))
    ]
    if not smaller:
        return
    try:
        check_forms_fit(dense.sites, [FORM], dense.config.model_type)
    except PlanError as failure:
        weight = smaller[0]
        problem = f"{weight.name} {_sized(shapes[weight.name])} would need the {failure.given}"
        expected = f"{weight.out_features} x {weight.in_features}, all heads, as config.json states"
        raise source.contradiction(problem, expected, "Prune its MLPs alone.") from failure
    for site in as_planned(dense.sites, [FORM], fused=False):
        if any(weight in smaller for weight in site.weights):
            yield _key_value_heads(source, site, [shapes[weight.name] for weight in site.weights])


def _key_value_heads(source: Source, site: Site, shapes: Sequence[tuple[int, int] | None]) -> SharedDim:
    form, heads = form_named(FORM), form_named(FORM).full(site.weights[0])

    def expected_shapes(count: int) -> list[tuple[int, int]]:
        modules = [form.module(weight, count).sizes for weight in site.weights]
        return [(sizes["out_features"], sizes["in_features"]) for sizes in modules]

    kept = next((count for count in range(1, heads + 1) if expected_shapes(count) == shapes), None)
    if kept is None:
        names = short_names([weight.name for weight in site.weights]).values()
        stored = ", ".join(f"{name} {_sized(shape)}" for name, shape in zip(names, shapes, strict=True))
        expected = ", ".join(
            " x ".join(f"{size}" if size == double else f"{size}*h" for size, double in zip(*sides, strict=True))
            for sides in zip(expected_shapes(1), expected_shapes(2), strict=True)
        )
        raise source.contradiction(
            f"{site.weights[0].input_group} has {stored}",
            f"{expected} with one whole h from 1 to {heads}, the key-value heads that it keeps",
            "Prune the same whole groups in all of them, and let config.json state the hidden size, head_dim and "
            "numbers of heads from before.",
        )
    choices = [WeightChoice(weight, FORM, kept) for weight in site.weights]
    places = stored_places(source, choices, f"for {kept} key-value heads, as the weights of {site.name} have")
    return SharedDim(site.name, kept, places, form=FORM)


LAYOUTS: Mapping[str, Callable[[Source, DenseModel], Iterable[SharedDim]]] = MappingProxyType(
    {layout: partial(factored, peer) for layout, peer in PEERS.items()}
    | {"latent attention": value_heads, "MLP widths": mlp_widths, "fewer heads": fewer_heads}
)
"""Of checkpoints that others wrote; GAC's own are read by their plan."""


def find_dims(source: Source) -> dict[str, tuple[SharedDim, ...]]:
    """Every shared dim of a checkpoint that others wrote, by layout.

    A CheckpointError says if there is none, or if the tensors contradict each other or the config.
    """
    dense = dense_model(source.config)
    layouts = {name: dims for name, find in LAYOUTS.items() if (dims := tuple(find(source, dense)))}
    if not layouts:
        raise CheckpointError(
            f"{source.directory} (model_type {source.config.get('model_type')!r}) has nothing that can be padded",
            f"{', '.join(LAYOUTS)}, or a checkpoint of GAC",
            "Check the names of its tensors.",
        )
    fixed = " and ".join(name for name, dims in layouts.items() if any(dim.fixed for dim in dims))
    others = " and ".join(name for name, dims in layouts.items() if any(dim.form is None for dim in dims))
    if fixed and others:  # forms describe all weights, or none
        raise source.contradiction(
            f"{fixed} beside {others}",
            f"{fixed} in a model whose other weights are dense, but for MLPs with fewer neurons",
            "Multiply the factors out, or factor a model with all its heads.",
        )
    return layouts
