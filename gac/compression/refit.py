"""Fitting the weights of a compressed model again, layer by layer, to what the dense model does.

A weight was truncated for the inputs that the dense model gives it; in the compressed model it reads the output of
truncated weights. So each layer's weights are solved for again in the order in which they run, on the activations of
the model as it is compressed so far. With S = E[x' x'^T] of those activations, x the dense model's, and every token
counting as it does in the moments:

- a weight inside a layer is fitted half a step towards its dense outputs W x: ``W T`` with
  ``T = I + 1/2 (E[x x'^T] - S) (S + D)^-1``;
- a weight that writes to the residual stream (o_proj, down_proj) is fitted to its dense output and to what the residual
  stream has lost so far: ``W + (E[t x'^T] - W S) (S + D)^-1``, t being both together.

Then it is truncated again, in the metric of the method with S in place of A. D damps. Dense targets on compressed
inputs are GPTAQ's (arXiv 2504.02692), there for quantisation. SVD-LLM's closed-form update (arXiv 2403.07378, section
3.2) is here too: of low-rank weights it re-solves the second factor alone, for W x'.
``tests/benchmarks/README.md`` has what each part gives.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from gac.compression.layers import LowRankLinear
from gac.compression.side_by_side import Seen, SideBySide
from gac.errors import GacError, did_you_mean
from gac.forms import Weight, form_named
from gac.models.linears import as_linear, read_weight
from gac.plan import Plan, WeightChoice
from gac.sensitivity.calibration import Moments, decoder_layers
from gac.sensitivity.factors import LayerFactors
from gac.sensitivity.layerwise import frozen
from gac.sensitivity.linalg import cholesky, damped, eigh, tf32_products
from gac.sensitivity.methods import Method, balanced, decompose
from gac.sites import Site

MEAN, OWN = 3e-2, 1e-1
"""Damping of the regressions, see ``gac.sensitivity.linalg.damped``."""
LEFT: Mapping[str, float] = MappingProxyType({"none": 1.0, "update": 1.0, "residual": 0.8})
"""What is left of the predicted loss, fitted once on SmolLM2-135M at kept 0.9 to 0.6 as ``FACTOR`` is."""
Refit = Literal["none", "residual", "update"]

STEP = 0.5
"""How far a weight inside a layer goes towards its dense outputs."""


def refit_named(asked: str | None, rule: str, method: Method, sites: Sequence[Site], model_type: str) -> Refit:
    """How a plan's weights are fitted again: what was asked for, or what suits the rule, the method and the layers.

    Raises:
        GacError: there is no such way, or the layers do more to the residual stream than to add.
    """
    plain = any(weight.writes for site in sites for weight in site.weights)
    if asked is None:
        return "residual" if rule == "loss" and method.refits and plain else "none"
    if asked == "none":
        return "none"
    if asked == "update":
        return "update"
    if asked == "residual" and plain:
        return "residual"
    if asked == "residual":
        given = f"refit {asked!r} of a {model_type} model, whose layers change what o_proj and down_proj write"
        raise GacError(given, "layers that add it to the residual stream", "Use refit='none'.")
    known = ("none", *REFITS)
    raise GacError(f"refit {asked!r}", f"one of {', '.join(known)}", did_you_mean(asked, known, "Correct the name."))


def refit(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    plan: Plan,
    sites: Sequence[Site],
    factors: Mapping[int, LayerFactors],
    windows: Tensor,
    method: Method,
    *,
    progress: bool = True,
) -> dict[str, nn.Module]:
    """The modules of a plan fitted as it says (``plan.refit``), and fitted copies of the weights that stay dense.

    The model is as it was when this returns or raises.

    Args:
        model: the dense model.
        modules: the new module of every weight that changes, by name; what they hold is changed.
        sites: all of the model's, as planned.
        factors: by layer, from the first that changes on.
        windows: calibration token ids, int64, shape ``(windows, tokens)``.

    Raises:
        ModelError: a layer does more to the residual stream than to add what its weights write.
    """
    if not modules:
        return {}
    fits = REFITS[plan.refit]
    choices = {choice.name: choice for choice in plan.weights}
    layers = {layer: [w for site in group for w in site.weights] for layer, group in groupby(sites, lambda s: s.layer)}
    lowest = min(layer for layer, weights in layers.items() if any(weight.name in modules for weight in weights))
    both = SideBySide(model, decoder_layers(model, layers), windows)
    fitted: dict[str, nn.Module] = {}
    with frozen(model), torch.no_grad():
        both.start(lowest)
        for layer in tqdm(range(lowest, len(layers)), "refitting", unit="layer", disable=not progress):
            stages = _stages(layers[layer])
            seen = both.dense_pass(layer, stages)
            dense = {weight.name: _Dense.of(model, weight) for weight in layers[layer]}
            new = {name: modules.get(name) or deepcopy(model.get_submodule(name)) for name in dense}
            with _swapped(model, new):
                for stage in stages:
                    found = _regressions(both, layer, stage, seen, factors[layer], dense)
                    for weight in stage:
                        choice = choices[weight.name]
                        work = _Work(
                            weight, choice, dense[weight.name].matrix, factors[layer], found.pop(weight.name), method
                        )
                        fits[form_named(choice.form).kind](work, new[weight.name])
                both.compressed_pass(layer)
            fitted |= new
    return fitted


def _stages(weights: Sequence[Weight]) -> list[list[Weight]]:
    """Weights in the order in which they run; those that read the same input together."""
    return [list(stage) for _, stage in groupby(weights, lambda weight: weight.reads or weight.name)]


@dataclass(frozen=True, eq=False)
class _Dense:
    """A weight of the dense model: W, shape ``(out, in)``, and its bias."""

    matrix: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, model: nn.Module, weight: Weight) -> "_Dense":
        return cls(read_weight(model, weight.name), as_linear(model.get_submodule(weight.name)).bias)  # type: ignore[arg-type]

    def product(self, output: Tensor) -> Tensor:
        """W x of what the weight has written."""
        return output if self.bias is None else output - self.bias


@contextmanager
def _swapped(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    before = {name: model.get_submodule(name) for name in modules}
    for name, module in modules.items():
        model.set_submodule(name, module)
    try:
        yield
    finally:
        for name, module in before.items():
            model.set_submodule(name, module)


def _regressions(
    both: SideBySide,
    layer: int,
    stage: Sequence[Weight],
    seen: Seen,
    factors: LayerFactors,
    dense: Mapping[str, _Dense],
) -> dict[str, "_Regression"]:
    """What the weights of a stage are fitted with, from a run of the compressed layer as far as them."""
    found: dict[str, _Regression] = {}
    for at, (x, lost) in enumerate(both.inputs_of(layer, stage, seen)):
        for weight in stage:
            if lost is None:
                target = seen.read[stage[0].name][at].reshape(-1, weight.in_features)
            else:
                target = dense[weight.name].product(seen.written[weight.name][at].view_as(lost)) + lost
            if weight.name not in found:
                found[weight.name] = _Regression(x.shape[1], target.shape[1], x.device)
            found[weight.name].add(x, target, factors.tokens(weight)[at].to(x.device))
    return found


class _Regression:
    """Sums over the tokens that a weight is fitted with: its inputs x' in the compressed model, and its target.

    The target t is the dense input of a weight inside a layer, and what is to be written of one that writes.
    """

    def __init__(self, inputs: int, targets: int, device: torch.device) -> None:
        kind = torch.float64 if device.type == "cpu" else torch.float32
        self._square = torch.zeros(inputs, inputs, dtype=kind, device=device)
        self._cross = torch.zeros(targets, inputs, dtype=kind, device=device)
        self._scale = torch.zeros(inputs, dtype=kind, device=device)
        self._count = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, x: Tensor, target: Tensor, counts: Tensor) -> None:
        """One window: x ``(tokens, in)``, target ``(tokens, out)``, how much each token counts ``(tokens,)``."""
        roots = counts.sqrt()[:, None]
        rows, columns = x.float() * roots, target.float() * roots
        with tf32_products(x):
            self._square += rows.T @ rows
            self._cross += columns.T @ rows
        self._scale += x.float().abs().T @ counts
        self._count += counts.sum(dtype=torch.float64)

    @property
    def square(self) -> Tensor:
        """S, float64."""
        return self._square.double() / self._total

    @property
    def cross(self) -> Tensor:
        """E[t x'^T], float64."""
        return self._cross.double() / self._total

    def moments(self, gradients: Tensor) -> Moments:
        """S in place of the dense model's moment of the inputs."""
        return Moments(self.square.float(), gradients, (self._scale / self._total).float())

    @property
    def _total(self) -> Tensor:
        return self._count.clamp_min(torch.finfo(torch.float32).tiny)


@dataclass(frozen=True, eq=False)
class _Work:
    """One weight being fitted."""

    weight: Weight
    choice: WeightChoice
    dense: Tensor
    factors: LayerFactors
    found: _Regression
    method: Method

    def turn(self) -> Tensor:
        """T of a weight inside a layer."""
        square = self.found.square
        eye = torch.eye(len(square), dtype=square.dtype, device=square.device)
        return eye + STEP * self._solved(self.found.cross - square)

    def matrix(self, before: Tensor) -> Tensor:
        """What a matrix ``(out, in)`` that reads x' becomes, float64."""
        before = before.detach().double()
        if not self.weight.writes:
            return before @ self.turn()
        return before + self._solved(self.found.cross - before @ self.found.square)

    def _solved(self, missing: Tensor) -> Tensor:
        """Times (S + D)^-1."""
        return torch.cholesky_solve(missing.T, cholesky(damped(self.found.square, MEAN, OWN))).T


def _whole(work: _Work, module: nn.Module) -> None:
    """A single GEMM, however short."""
    weight = as_linear(module).weight
    assert isinstance(weight, Tensor)
    weight.copy_(work.matrix(weight))


def _low_rank(work: _Work, module: nn.Module) -> None:
    assert isinstance(module, LowRankLinear)
    second, first = _truncated_again(work)
    module.second.weight.copy_(second)
    module.first.weight.copy_(first)


def _first_only(work: _Work, module: nn.Module) -> None:
    """The first factors of groups of heads; what follows them stays."""
    assert isinstance(module, LowRankLinear)
    module.first.weight.copy_(module.first.weight.double() @ work.turn())


def _second_only(work: _Work, module: nn.Module) -> None:
    """SVD-LLM's closed-form update: ``W S A^T (A S A^T)^-1``."""
    assert isinstance(module, LowRankLinear)
    first = module.first.weight.double()
    square = work.found.square
    gram = damped(first @ square @ first.T, 1e-9)
    right = first @ square @ work.dense.double().T
    module.second.weight.copy_(torch.cholesky_solve(right, cholesky(gram)).T)


def _as_it_is(work: _Work, module: nn.Module) -> None:
    """Not fitted."""


# How each kind of form takes a fitted weight.
REFITS: Mapping[str, Mapping[str, Callable[[_Work, nn.Module], None]]] = MappingProxyType(
    {
        "residual": {
            "dense": _whole,
            "low_rank": _low_rank,
            "narrow": _whole,
            "head_dim": _whole,
            "grouped": _first_only,
        },
        "update": {
            "dense": _as_it_is,
            "low_rank": _second_only,
            "narrow": _as_it_is,
            "head_dim": _as_it_is,
            "grouped": _as_it_is,
        },
    }
)


def _truncated_again(work: _Work) -> tuple[Tensor, Tensor]:
    """``(second (out, rank), first (rank, in))``.

    Of a weight inside a layer W T is known by its factors B A T, and the metric of its outputs by the gains
    c = diag(B^T G B): with F = diag(c)^1/2 A T and U the leading eigenvectors of F S F^T the best rank-r weight is
    B diag(c)^-1/2 U U^T F. So G itself, which for gate and up is the largest statistic, is not needed.
    """
    rank = work.choice.dim
    if work.weight.writes:
        moments = work.found.moments(work.factors.gradients(work.weight))
        return decompose(work.matrix(work.dense), work.method.metric(moments)).factors(rank)
    second, first = (factor.double() for factor in work.factors.every_rank(work.weight))
    gains = work.factors.gains(work.weight)
    roots = gains.clamp_min(gains.max() * 1e-24).sqrt()
    turned = roots[:, None] * (first @ work.turn())
    inputs = work.method.inputs(work.found.moments(work.found.square))
    _, vectors = eigh(turned @ inputs @ turned.T)
    return balanced(second @ (vectors[:, :rank] / roots[:, None]), vectors[:, :rank].T @ turned)
