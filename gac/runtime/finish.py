"""The last step of a compressed model before it runs: everything that a config describes besides modules."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from gac.runtime.fusion.elementwise import fuse_elementwise
from gac.runtime.fusion.quantised_inputs import quantise_in_norms
from gac.runtime.fusion.shared_gemm import share_gemm
from gac.runtime.latents.attention import cache_latents
from gac.runtime.plain.modeling_gac import SkippedBlock, skip_block

_logger = logging.getLogger("gac")


class Skipped(TypedDict):
    """A block that is left out, the weight in it that writes its output, and the norms that only it reads."""

    block: str
    output: str
    attention: bool
    norms: Sequence[str]


class QuantisedInputs(TypedDict):
    """A norm whose output is quantised, and the weights that read it."""

    by: str
    readers: Sequence[str]


@dataclass(frozen=True)
class Description:
    """The way a compressed model runs besides its modules, by the names of these in the model."""

    fused: Sequence[Sequence[str]] = ()  # groups of weights whose first GEMMs run as one, in the order of their calls
    skipped: Sequence[Skipped] = ()  # as ``Skipped``
    quantised: Sequence[QuantisedInputs] = ()  # as ``QuantisedInputs``


def finish(model: Any, description: Description, kernels: bool = True) -> None:
    """Let a model that has its modules and tensors run as it is described; it is changed in place.

    Outputs are the same up to rounding, and ``state_dict`` is the same. ``kernels``: norms, activations and rotary
    embeddings run in GAC's kernels where they can.
    """
    # Shared GEMMs come first: they replace modules, which all later steps look up by name.
    # Skipped blocks come before kernels: a norm or an MLP that is left out is not to get one.
    # Norms that quantise come after plain ones, whose place they take; they need the first GEMMs that are shared.
    # Latents come last: hooks see the attentions and second factors that really run.
    _share_gemms(model, description.fused)
    for block in description.skipped:
        if not isinstance(model.get_submodule(block["block"]), SkippedBlock):
            skip_block(model, **block)
    if kernels:
        fuse_elementwise(model)
        quantise_in_norms(model, description.quantised)
    cache_latents(model)


def _share_gemms(model: Any, groups: Sequence[Sequence[str]]) -> None:
    weights = [model.get_submodule(name) for names in groups for name in names]
    tensors = (tensor for weight in weights for tensor in (*weight.parameters(), *weight.buffers()))
    if groups and (getattr(model, "hf_quantizer", None) or any(tensor.is_meta for tensor in tensors)):
        _logger.warning("weights that read the same input run by themselves: they are quantised or offloaded")
        return
    for names in groups:
        share_gemm(model, names)
