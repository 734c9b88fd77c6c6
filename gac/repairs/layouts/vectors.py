"""Vectors that may have any length: the neurons of an MLP, and the values of latent attention.

Longer ones that end in zeros give the same outputs. MLPs have a number of neurons for each layer, as LLM-Pruner leaves
them. Value vectors of latent attention (DeepSeek-V2's MLA) are written by kv_b_proj and read by o_proj. Those of
queries and keys stay, for the softmax is scaled by their length. So do the latents: a norm takes their mean square.
"""

from collections.abc import Iterator
from dataclasses import replace

from gac.forms.base import Place, ends
from gac.models.families import Family
from gac.repairs.dense import DenseModel
from gac.repairs.shared_dims import Block, Run, SharedDim
from gac.repairs.weight_files import Source

WRITES, READS, STATED = ".kv_b_proj.weight", ".o_proj.weight", "v_head_dim"
_DIMS = ("num_attention_heads", "qk_nope_head_dim", STATED)


def value_heads(source: Source, dense: DenseModel) -> Iterator[Block]:
    """The value vectors of every layer; they are all of one length, which the config states."""
    if not all(isinstance(source.config.get(name), int) for name in _DIMS):
        return
    heads, keys, values = (int(source.config[name]) for name in _DIMS)
    for name in source.tensors:
        if name.endswith(WRITES):
            output = name.removesuffix(WRITES) + READS
            written = source.matrix(name)
            read = source.matrix(output) if output in source.tensors else None
            if read is None or written[0] != heads * (keys + values) or read[1] != heads * values:
                raise source.contradiction(
                    f"{name} {written} and {output} {read or 'missing'}",
                    f"{heads * (keys + values)} rows and {heads * values} columns, as config.json states",
                )
            yield _block(name.removesuffix(WRITES), heads, keys, values, written[1], read[0])


def _block(name: str, heads: int, keys: int, values: int, latent: int, hidden: int) -> Block:
    places = Place(name + WRITES, 0, ends(keys + values, heads)), Place(name + READS, 1, ends(values, heads))
    moved = ((name, heads),)
    runs = (
        Run("linear", (("k", latent),), "n", moved, rest=heads * keys),
        Run("linear", (("n", hidden),), "k", moved),
    )
    return Block((SharedDim(name, values, places, stated=(STATED,)),), runs)


def mlp_widths(source: Source, dense: DenseModel) -> list[Block]:
    """The MLPs whose weights are dense; the config's number of neurons moves with them where it is that of all."""
    if dense.family is None:
        return []
    prefixes = [f"{dense.family.layers}.{layer}." for layer in range(dense.layers)]
    found = [block for prefix in prefixes for block in _mlp(source, dense, dense.family, prefix)]
    widths = {shared_dim.dim for block in found for shared_dim in block.shared}
    key = dense.family.neurons
    if len(found) < dense.layers or widths != {source.config.get(key)}:
        return found
    return [
        replace(block, shared=tuple(replace(shared_dim, stated=(key,)) for shared_dim in block.shared))
        for block in found
    ]


def _mlp(source: Source, dense: DenseModel, family: Family, prefix: str) -> Iterator[Block]:
    ups, down = [f"{prefix}{name}.weight" for name in family.up], f"{prefix}{family.down}.weight"
    if not all(name in source.tensors for name in (*ups, down)):
        return  # they are factored
    shapes = [source.matrix(name) for name in (*ups, down)]
    flip = _transposed(shapes, dense.hidden)
    *above, below = [shape[::-1] if flip else shape for shape in shapes]
    width, hidden = below[1], dense.hidden
    if below[0] != hidden or any(shape != (family.blocks * width, hidden) for shape in above):
        given = ", ".join(
            f"{name} {rows} x {columns}" for name, (rows, columns) in zip((*ups, down), shapes, strict=True)
        )
        raise source.contradiction(given, f"weights that share their neurons, and a hidden size of {hidden}")
    name = down.removesuffix(".weight").rpartition(".")[0]
    biases = [bias for bias in (up.removesuffix("weight") + "bias" for up in ups) if bias in source.tensors]
    places = (
        *(Place(up, int(flip), ends(width, family.blocks)) for up in ups),
        *(Place(bias, 0, ends(width, family.blocks)) for bias in biases),
        Place(down, 1 - int(flip), (width,)),
    )
    writes = Run("linear", (("k", hidden),), "n", ((name, family.blocks),))
    reads = Run("linear", (("n", hidden),), "k", ((name, 1),))
    yield Block((SharedDim(name, width, places, form="narrow"),), (*(writes for _ in ups), reads))


def _transposed(shapes: list[tuple[int, int]], hidden: int) -> bool:
    """Whether the weights are stored as ``(in, out)`` (GPT-2)."""
    *above, below = shapes
    as_usual = all(shape[1] == hidden for shape in above) and below[0] == hidden
    return not as_usual and all(shape[0] == hidden for shape in above) and below[1] == hidden
