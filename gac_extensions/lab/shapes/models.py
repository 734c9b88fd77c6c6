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
from gac.allocation.resolve import engine_steps
from gac.compression.apply import describe, empty_module, skipped_blocks, where_they_run
from gac.compression.rounding import store
from gac.core.workloads import Workload
from gac.measurement.embeddings import replace_embeddings
from gac.models.families import family_of
from gac.models.linears import linear_at
from gac.models.modules import swap_in
from gac.models.shapes import Shapes, shapes_of
from gac.models.sites import Site
from gac.plan.engines import TRANSFORMERS
from gac.plan.plan import Measured, WeightChoice
from gac.plan.recipe import Recipe
from gac.profiling.select import select_profile
from gac.runtime.finish import Description, finish
from gac.runtime.plain.modeling_gac import Absent, Constant
from gac.schemes import scheme_named
from gac_extensions.lab.shapes.curve_library import CurveLibrary
from gac_extensions.lab.shapes.versions import Planner

_AutoConfig: Any = transformers.AutoConfig
_AutoModel: Any = transformers.AutoModelForCausalLM
_POSITIONS = 131_072
SCALE = 0.02  # standard deviation of random weights


def planner_of_shapes(
    name: str | Shapes,
    workloads: Sequence[Workload],
    profile: str | Path | None = None,
    layers: int | None = None,
    library: CurveLibrary | None = None,
    schemes: Sequence[str] = (),
    gpus: int = 1,
    engine: str = TRANSFORMERS.name,
) -> Planner:
    """A planner for shapes or their name (``gac.models.shapes.SHAPES``), with SmolLM2's loss curves (``CurveLibrary``).

    Args:
        layers: to plan fewer layers than the model has.
        schemes: that plans may use; a ModelError if the loss of one is unknown.
        gpus: that weights are split over.
        engine: that plans are made for.
    """
    shapes, label = _shapes(name, layers), name if isinstance(name, str) else name.model_type
    sites = family_of(shapes).sites(shapes)
    library = library or CurveLibrary.load()
    curves = library.curves_of(sites, schemes)
    table, used = select_profile(profile)
    head = 2 * shapes.vocab_size * shapes.hidden_size
    measured = Measured(
        model=f"{label} (random weights)",
        digest=f"shapes of {label}",
        params=sum(site.params for site in sites) + head,
        family=shapes.model_type,
        calibration=library.calibration,
        profile=used,
        factor=1.0,
    )
    recipe = Recipe.of(
        method=library.method, workloads=map(str, workloads), refit="none", tensor_parallel=gpus, engine=engine
    )
    return Planner(
        Problem(sites, curves, table, recipe, measured, steps=engine_steps(shapes, recipe.deployment, table, schemes))
    )


def model_of_shapes(
    name: str, *, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, layers: int | None = None
) -> PreTrainedModel:
    """A dense model of these shapes with transformers' random weights; a ModelError if they are unknown."""
    sizes = asdict(_shapes(name, layers))
    config = _AutoConfig.for_model(**sizes, max_position_embeddings=_POSITIONS, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = _AutoModel.from_config(config, dtype=dtype).eval()
    return model.requires_grad_(False)


def _shapes(name: str | Shapes, layers: int | None) -> Shapes:
    shapes: Shapes = shapes_of(name)
    return replace(shapes, num_hidden_layers=layers or shapes.num_hidden_layers)


def variant(
    model: PreTrainedModel,
    choices: Sequence[WeightChoice],
    fused: Sequence[Site] = (),
    plain: bool = False,
    ends: Mapping[str, nn.Module] = MappingProxyType({}),
) -> PreTrainedModel:
    """The model with these choices: random weights where one changes; the others are shared with the model.

    Args:
        fused: sites whose marked weights share their first GEMM.
        plain: run norms, activations and rotary embeddings as transformers does.
        ends: in place of embedding and LM head, by name.
    """
    copied = sharing(model)
    replace_embeddings(copied, ends)
    swap_in(copied, {each.name: _random(model, each) for each in choices if each.form != "dense" or is_stored(each)})
    return running(copied, choices, fused, plain)


def running(
    model: PreTrainedModel, choices: Sequence[WeightChoice], fused: Sequence[Site], plain: bool
) -> PreTrainedModel:
    """Finish a model that has these choices, in place; arguments as for ``variant``."""
    finish(model, describe(model.config, where_they_run(fused, choices), choices), kernels=not plain)
    return model


def without_gemms(
    model: PreTrainedModel, choices: Sequence[WeightChoice], ends: Mapping[str, nn.Module] = MappingProxyType({})
) -> PreTrainedModel:
    """The model with these choices, each GEMM replaced by a buffer of its outputs; ``ends`` as for ``variant``."""
    copied = sharing(model)
    replace_embeddings(copied, ends)
    outputs: dict[tuple[int, int], Tensor] = {}
    for choice in choices:
        module: Any = empty_module(choice, bias=False, device="meta", dtype=model.dtype)
        runs = not isinstance(module, Absent | Constant)
        copied.set_submodule(choice.name, StandIn(module.out_features, outputs) if runs else _random(model, choice))
    finish(copied, Description(skipped=skipped_blocks(copied.config, choices)))
    return copied


class StandIn(nn.Module):
    """Replaces a linear weight: returns a random output of its shape at no cost, from the shared ``outputs``."""

    def __init__(self, features: int, outputs: dict[tuple[int, int], Tensor]) -> None:
        super().__init__()
        self._features, self._outputs = features, outputs

    def forward(self, x: Tensor) -> Tensor:
        *leading, _ = x.shape
        key = (x.shape[:-1].numel(), self._features)
        if key not in self._outputs:
            self._outputs[key] = torch.randn(key, dtype=torch.float32, device=x.device).to(x.dtype)
        return self._outputs[key].view(*leading, self._features)


def sharing(model: PreTrainedModel) -> PreTrainedModel:
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def is_stored(choice: WeightChoice) -> bool:
    return scheme_named(choice.scheme).storage is not None


def _random(model: PreTrainedModel, choice: WeightChoice) -> nn.Module:
    dense = linear_at(model, choice.name)
    module = empty_module(choice, dense.bias is not None, dense.weight.device, dense.weight.dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=SCALE)
    module = module.eval().requires_grad_(False)
    return store(scheme_named(choice.scheme), module) if is_stored(choice) else module
