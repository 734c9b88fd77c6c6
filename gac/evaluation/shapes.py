"""Models to time: of known shapes with random weights, with the dims of a plan, and without their GEMMs."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from gac.allocation.problem import Problem
from gac.compression.apply import describe, empty_module, skipped_blocks, where_they_run
from gac.compression.ends import swap_in_ends
from gac.compression.rounding import store
from gac.core.workloads import Workload
from gac.evaluation.versions import Planner
from gac.measurement.curve_library import CurveLibrary
from gac.models.families import family_of
from gac.models.linears import linear_at
from gac.models.modules import swap_in
from gac.models.shapes import Shapes, shapes_of
from gac.models.sites import Site
from gac.plan.plan import Measured, WeightChoice
from gac.plan.recipe import Recipe
from gac.profiling.select import select_profile
from gac.runtime.finish import Description, finish
from gac.runtime.plain.modeling_gac import Absent, Constant
from gac.runtime.storage.modules import stored_modules
from gac.schemes import scheme_named

_AutoConfig: Any = transformers.AutoConfig
_AutoModel: Any = transformers.AutoModelForCausalLM
_POSITIONS = 131_072
SCALE = 0.02
"""The standard deviation of random weights."""


def planner_of_shapes(
    name: str | Shapes,
    workloads: Sequence[Workload],
    profile: str | Path | None = None,
    layers: int | None = None,
    library: CurveLibrary | None = None,
    schemes: Sequence[str] = (),
    gpus: int = 1,
) -> Planner:
    """What plans for these shapes are made from; curves are SmolLM2's, see ``CurveLibrary``.

    Args:
        name: in ``gac.models.shapes.SHAPES``, or shapes of one's own.
        layers: fewer than the model has.
        schemes: in which plans may round.
        gpus: over how many weights are split.

    Raises:
        ModelError: the shapes are unknown, their weights have names of their own, or no price of rounding to a scheme
            is known.
        ProfileError: as for ``gac.allocate``.
    """
    shapes, called = _shapes(name, layers), name if isinstance(name, str) else name.model_type
    sites = family_of(shapes).sites(shapes)
    library = library or CurveLibrary.load()
    curves = library.curves_of(sites, schemes)
    table, used = select_profile(profile)
    head = 2 * shapes.vocab_size * shapes.hidden_size
    measured = Measured(
        model=f"{called} (random weights)",
        digest=f"shapes of {called}",
        params=sum(site.params for site in sites) + head,
        family=shapes.model_type,
        calibration=library.calibration,
        profile=used,
        factor=1.0,
    )
    recipe = Recipe.of(method=library.method, workloads=map(str, workloads), refit="none", tensor_parallel=gpus)
    return Planner(Problem(sites, curves, table, recipe, measured))


def model_of_shapes(
    name: str, *, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, layers: int | None = None
) -> PreTrainedModel:
    """A dense model of these shapes, with the random weights that transformers gives it, made on the device.

    Raises:
        ModelError: the shapes are unknown.
    """
    sizes = asdict(_shapes(name, layers))
    config = _AutoConfig.for_model(**sizes, max_position_embeddings=_POSITIONS, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = _AutoModel.from_config(config, dtype=dtype).eval()
    return model.requires_grad_(False)


def _shapes(name: str | Shapes, layers: int | None) -> Shapes:
    found: Shapes = shapes_of(name)
    return replace(found, num_hidden_layers=layers or found.num_hidden_layers)


def variant(
    model: PreTrainedModel,
    choices: Sequence[WeightChoice],
    fused: Sequence[Site] = (),
    plain: bool = False,
    ends: Mapping[str, nn.Module] = MappingProxyType({}),
) -> PreTrainedModel:
    """The model with these forms, dims and schemes: random weights where one changes, the model's own elsewhere.

    What does not change is shared with the model, and takes no memory again.

    Args:
        choices: of every weight.
        fused: sites whose marked weights run their first GEMMs as one.
        plain: whether norms, activations and rotary embeddings run as in transformers.
        ends: what stands in the place of embedding and head, by name.
    """
    found = sharing(model)
    swap_in_ends(found, ends)
    swap_in(found, {one.name: _random(model, one) for one in choices if one.form != "dense" or is_stored(one)})
    return running(found, choices, fused, plain)


def running(
    model: PreTrainedModel, choices: Sequence[WeightChoice], fused: Sequence[Site], plain: bool
) -> PreTrainedModel:
    """The same model, which has these weights, as a compressed one runs; arguments as for ``variant``."""
    finish(model, describe(model.config, where_they_run(fused, choices), choices), kernels=not plain)
    return model


def without_gemms(
    model: PreTrainedModel, choices: Sequence[WeightChoice], ends: Mapping[str, nn.Module] = MappingProxyType({})
) -> PreTrainedModel:
    """The model with these choices and without their GEMMs: each weight hands out a buffer of its outputs instead.

    What is left is attention, norms, activations, embedding and head, and all launches but those of the GEMMs.

    Args:
        ends: as for ``variant``.
    """
    found = sharing(model)
    swap_in_ends(found, ends)
    outputs: dict[tuple[int, int], Tensor] = {}
    for choice in choices:
        module: Any = empty_module(choice, bias=False, device="meta", dtype=model.dtype)
        runs = not isinstance(module, Absent | Constant)
        found.set_submodule(choice.name, StandIn(module.out_features, outputs) if runs else _random(model, choice))
    finish(found, Description(skipped=skipped_blocks(found.config, choices)))
    return found


class StandIn(nn.Module):
    """Stands for a linear weight: outputs of its shape, always the same random ones, at no cost.

    Args:
        features: of the output.
        outputs: by rows and features, shared by weights alike.
    """

    def __init__(self, features: int, outputs: dict[tuple[int, int], Tensor]) -> None:
        super().__init__()
        self._features, self._outputs = features, outputs

    def forward(self, x: Tensor) -> Tensor:
        *leading, _ = x.shape
        key = (x.shape[:-1].numel(), self._features)
        if key not in self._outputs:
            self._outputs[key] = torch.randn(key, dtype=torch.float32, device=x.device).to(x.dtype)
        return self._outputs[key].view(*leading, self._features)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters, each counted once, and of what holds its matrices."""
    stored = [held for one in stored_modules(model).values() for held in one.counted.values()]
    return sum(values.nbytes for values in (*model.parameters(), *stored))


def sharing(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules that shares every parameter and buffer."""
    shared: dict[int, Any] = {id(one): one for one in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def _random(model: PreTrainedModel, choice: WeightChoice) -> nn.Module:
    dense = linear_at(model, choice.name)
    module = empty_module(choice, dense.bias is not None, dense.weight.device, dense.weight.dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=SCALE)
    module = module.eval().requires_grad_(False)
    return store(scheme_named(choice.scheme), module) if is_stored(choice) else module


def is_stored(choice: WeightChoice) -> bool:
    """Whether the weight's scheme has a storage."""
    return scheme_named(choice.scheme).storage is not None
