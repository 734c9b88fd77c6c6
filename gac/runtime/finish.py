"""The last step of a compressed model before it runs: everything that a config describes besides modules."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gac.runtime.fusion.elementwise import fuse_elementwise
from gac.runtime.fusion.quantised_inputs import quantise_in_norms
from gac.runtime.fusion.shared_gemm import share_gemm
from gac.runtime.latents.attention import cache_latents
from gac.runtime.plain.modeling_gac import SkippedBlock

_logger = logging.getLogger("gac")


@dataclass(frozen=True)
class Description:
    """The way a compressed model runs besides its modules, by the names of these in the model.

    Attributes:
        fused: groups of weights whose first GEMMs run as one, in the order of their calls.
        skipped: of each block that is left out its name (``block``), the name in it of the weight through which it
            writes (``output``), whether it is an ``attention``, and the names of its ``norms``.
        quantised: of each norm whose output is quantised its name (``by``), and those of the ``readers``.
    """

    fused: Sequence[Sequence[str]] = ()
    skipped: Sequence[Mapping[str, Any]] = ()
    quantised: Sequence[Mapping[str, Any]] = ()


def finish(model: Any, description: Description, kernels: bool = True) -> None:
    """Let a model that has its modules and tensors run as it is described; it is changed in place.

    Outputs are the same up to rounding, and ``state_dict`` is the same.

    Args:
        kernels: whether norms, activations and rotary embeddings run in GAC's kernels where they can.
    """
    # Shared GEMMs come first: they replace modules, which all later steps look up by name.
    # Skipped blocks come before kernels: a norm or an MLP that is left out is not to get one.
    # Norms that quantise come after plain ones, whose place they take; they need the first GEMMs that are shared.
    # Latents come last: hooks see the attentions and second factors that really run.
    _share_gemms(model, description.fused)
    skip_blocks(model, description.skipped)
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


def skip_blocks(model: nn.Module, blocks: Sequence[Mapping[str, Any]]) -> None:
    """Leave attentions and MLPs out, with the norms that only they read through, and keep their parameters."""
    for described in blocks:
        block = model.get_submodule(described["block"])
        if isinstance(block, SkippedBlock):
            continue
        model.set_submodule(described["block"], SkippedBlock(block, described["output"], described["attention"]))
        for name in described["norms"]:
            passed = nn.Identity()
            passed._parameters.update(model.get_submodule(name)._parameters)
            model.set_submodule(name, passed)
