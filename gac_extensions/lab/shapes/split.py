"""Models of known shapes to time, split over GPUs: each process makes its own shards, and never a full model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gac.compression.apply import empty_stored, skipped_blocks
from gac.evaluation.split import divided
from gac.models.linears import linear_at
from gac.models.modules import swap_in
from gac.models.sites import Site
from gac.plan.plan import WeightChoice
from gac.runtime.finish import Description, finish
from gac.runtime.parallel.ranks import Ranks
from gac.runtime.plain.modeling_gac import Absent
from gac.runtime.storage.modules import Stored, stored_modules
from gac.schemes import scheme_named
from gac_extensions.lab.shapes.models import SCALE, StandIn, is_stored, model_of_shapes, running, sharing


class SplitShapes:
    """This process's shard of named shapes, ``dense``, and shards of variants, with random weights.

    A ModelError says if the shapes are unknown or cannot be split.
    """

    def __init__(self, name: str, ranks: Ranks, dtype: torch.dtype = torch.bfloat16, layers: int | None = None) -> None:
        self.meta = model_of_shapes(name, device="meta", dtype=dtype, layers=layers)
        self.ranks = ranks
        self.dense: PreTrainedModel = self._filled(self._split(()), {}, ())

    def variant(
        self, choices: Sequence[WeightChoice], fused: Sequence[Site] = (), plain: bool = False
    ) -> PreTrainedModel:
        """As ``gac_extensions.lab.shapes.models.variant``, split; unchanged weights are shared with the dense shard."""
        changed = [choice for choice in choices if choice.form != "dense" or is_stored(choice)]
        model = self._filled(self._split(changed), dict(self.dense.named_parameters()), changed)
        return running(model, choices, fused, plain)

    def without_gemms(self, choices: Sequence[WeightChoice]) -> PreTrainedModel:
        """As ``gac_extensions.lab.shapes.models.without_gemms``, split, and without the collectives of the weights."""
        model = self._split([choice for choice in choices if choice.form != "dense"])
        outputs: dict[tuple[int, int], Tensor] = {}
        for choice in choices:
            module: Any = model.get_submodule(choice.name)
            if not isinstance(module, Absent):
                model.set_submodule(choice.name, StandIn(module.out_features, outputs))
        filled: PreTrainedModel = self._filled(model, dict(self.dense.named_parameters()), ())
        finish(filled, Description(skipped=skipped_blocks(filled.config, choices)))
        return filled

    def _split(self, changed: Sequence[WeightChoice]) -> Any:
        model, dtype = sharing(self.meta), self.meta.dtype
        biased = {choice.name: linear_at(self.meta, choice.name).bias is not None for choice in changed}
        swap_in(model, {each.name: empty_stored(each, biased[each.name], "meta", dtype).eval() for each in changed})
        return divided(model, replace(self.ranks, device=torch.device("meta")))

    @torch.no_grad()
    def _filled(self, model: Any, known: dict[str, nn.Parameter], changed: Sequence[WeightChoice]) -> Any:
        """Move the model to the device, with known parameters, and random ones for the rest."""
        names, device = tuple(f"{choice.name}." for choice in changed), self.ranks.device
        shared = {name: parameter for name, parameter in known.items() if not name.startswith(names or "\0")}
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.zeros_like(buffer, device=device))
        for name, empty in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            parameter = shared.get(name)
            if parameter is None or parameter.shape != empty.shape:  # an attention or MLP that is not split
                parameter = nn.Parameter(torch.empty_like(empty, device=device), requires_grad=False)
                nn.init.normal_(parameter, std=SCALE)
            setattr(model.get_submodule(owner), leaf, parameter)
        for module in model.modules():  # norms, and the frequencies of rotary embeddings
            if not isinstance(module, nn.Linear | nn.Embedding | Stored):
                model._init_weights(module)
        schemes = {choice.name: choice.scheme for choice in changed}
        for name, stored in stored_modules(model).items():
            scheme = next(scheme for weight, scheme in schemes.items() if f"{name}.".startswith(f"{weight}."))
            matrix = SCALE * torch.randn(stored.matrix, dtype=torch.float32, device=device)
            stored.fill(scheme_named(scheme).stored(matrix.to(self.meta.dtype)))
        return model
