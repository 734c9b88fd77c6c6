"""Value vectors of latent attention (DeepSeek-V2's MLA), which kv_b_proj writes and o_proj reads.

Their length may be any; longer ones that end in zeros give the same outputs. Those of queries and keys stay, for the
softmax is scaled by their length. So do the latents: a norm takes their mean square.
"""

from collections.abc import Iterator

from gac.forms.base import Place, ends
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
