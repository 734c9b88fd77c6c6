"""Fitting the weights of a compressed model again, layer by layer, to what the dense model does.

A weight was truncated for the inputs that the dense model gives it; in the compressed model it reads the output of
truncated weights. So each layer's weights are solved for again in the order in which they run, on the activations of
the model as it is compressed so far. With S = E[x' x'^T] of those activations, x the dense model's, and every token
counting as it does in the moments:

- a weight inside a layer is fitted half a step towards its dense outputs W x: ``W T`` with
  ``T = I + 1/2 (E[x x'^T] - S) (S + D)^-1``;
- a weight that writes to the residual stream (o_proj, down_proj) is fitted to its dense output and to what the residual
  stream has lost so far: ``W + (E[t x'^T] - W S) (S + D)^-1``, t being both together.

Then it is truncated again, in the metric of the method with S in place of A. D damps, more where there are few tokens
for an input feature. Dense targets on compressed inputs are GPTAQ's (arXiv 2504.02692), there for quantisation.
SVD-LLM's closed-form update (arXiv 2403.07378, section 3.2) is here too: of low-rank weights it re-solves the second
factor alone, for W x'.
``tests/benchmarks/README.md`` has what each part gives.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from types import MappingProxyType

import torch
from torch import Tensor, nn
from tqdm import tqdm

from gac.compression.paired_run import Seen, SideBySide
from gac.errors import GacError, did_you_mean
from gac.forms import form_named
from gac.models.linears import as_linear, linear_at, read_weight
from gac.models.sites import Site
from gac.models.weights import Weight
from gac.plan import Refit, WeightChoice
from gac.runtime.modules import LowRankLinear
from gac.sensitivity.calibration import Moments, decoder_layers
from gac.sensitivity.factors import LayerFactors
from gac.sensitivity.layerwise import frozen
from gac.sensitivity.linalg import cholesky, damped, eigh, tf32_products
from gac.sensitivity.methods import Method, balanced, decompose

MEAN, OWN = 3e-2, 1e-1
"""Damping of the regressions, see ``gac.sensitivity.linalg.damped``."""
TOKENS = 128
"""Tokens for each input feature from which that damping is enough; with fewer it grows as they get fewer."""
RESIDUAL_LEAVES = 0.88
"""What is left of the loss that ``kfac`` predicts, fitted once on SmolLM2-135M, where it is 0.77 at kept 0.9 and 1.00
at 0.6: so that neither is far off."""
STEP = 0.5
"""How far a weight inside a layer goes towards its dense outputs."""


def leaves(refit: Refit, method: Method) -> float:
    """The share of the predicted loss that is expected where weights are fitted again; 1 where none was fitted."""
    return RESIDUAL_LEAVES if refit == "residual" and method.refits else 1.0


def refit_named(
    asked: str | None, rule: str, method: Method, forms: Sequence[str], sites: Sequence[Site], model_type: str
) -> Refit:
    """How a plan's weights are fitted again: what was asked for, or what suits the rule, the method and the layers.

    Raises:
        GacError: there is no such way, it fits none of the forms, or the layers do more to the residual stream than to
            add.
    """
    plain = any(weight.writes for site in sites for weight in site.weights)
    if asked is None:
        return "residual" if rule == "loss" and method.refits and plain else "none"
    if asked == "none":
        return "none"
    if asked == "update" and any(form_named(name).kind in REFITS[asked] for name in forms):
        return "update"
    if asked == "update":
        given = f"refit 'update' with forms {', '.join(forms) or 'none'}"
        raise GacError(given, "low_rank among the forms, the only one that it fits", "Use refit='none'.")
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
    weights: Sequence[WeightChoice],
    how: Refit,
    sites: Sequence[Site],
    factors: Mapping[int, LayerFactors],
    windows: Tensor,
    method: Method,
    *,
    progress: bool = True,
) -> dict[str, nn.Module]:
    """The modules of compressed weights fitted again, and fitted copies of the weights that stay dense.

    The model is as it was when this returns or raises.

    Args:
        model: the dense model.
        modules: the new module of every weight that changes, by name; what they hold is changed.
        weights: what every weight becomes.
        how: one of ``REFITS``.
        sites: all of the model's, as planned.
        factors: by layer, from the first that changes on.
        windows: calibration token ids, int64, shape ``(windows, tokens)``.

    Raises:
        ModelError: a layer does more to the residual stream than to add what its weights write.
    """
    if not modules:
        return {}
    layers = {layer: [w for site in group for w in site.weights] for layer, group in groupby(sites, lambda s: s.layer)}
    lowest = min(layer for layer, weights in layers.items() if any(weight.name in modules for weight in weights))
    both = SideBySide(model, decoder_layers(model, layers), windows)
    choices = {choice.name: choice for choice in weights}
    modes = {weight.name: _Mode.of(linear_at(model, weight.name)) for group in layers.values() for weight in group}
    fitted = dict(modules)
    with frozen(model), torch.no_grad():
        both.start(lowest)
        for layer in tqdm(range(lowest, len(layers)), "refitting", unit="layer", disable=not progress):
            fit = _LayerFit(model, both, layer, layers[layer], choices, factors[layer], method, REFITS[how])
            fitted |= fit.run(modules)
    for name, module in fitted.items():
        modes[name].put(module)
    return fitted


@dataclass(frozen=True)
class _Mode:
    """Whether a module trains, and whether its weight does."""

    training: bool
    requires_grad: bool

    @classmethod
    def of(cls, linear: nn.Linear) -> "_Mode":
        return cls(linear.training, linear.weight.requires_grad)

    def put(self, module: nn.Module) -> None:
        module.train(self.training).requires_grad_(self.requires_grad)


@dataclass(frozen=True, eq=False)
class _LayerFit:
    """One layer being fitted."""

    model: nn.Module
    both: SideBySide
    layer: int
    weights: Sequence[Weight]
    choices: Mapping[str, WeightChoice]
    factors: LayerFactors
    method: Method
    fits: "Mapping[str, Callable[[_Work, nn.Module], None]]"

    def run(self, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """Fit the layer's weights in the order in which they run, and take both models' states through it."""
        stages = [list(stage) for _, stage in groupby(self.weights, lambda weight: weight.reads or weight.name)]
        seen = self.both.dense_pass(self.layer, stages)
        dense = {weight.name: _Dense.of(self.model, weight) for weight in self.weights}
        new = {
            weight.name: modules.get(weight.name) or deepcopy(self.model.get_submodule(weight.name))
            for weight in self.weights
            if weight.name in modules or self._fit_of(weight)
        }
        with _swapped(self.model, new):
            for stage in stages:
                fitted = [weight for weight in stage if self._fit_of(weight)]
                found = self._sums(stage, fitted, seen, dense) if fitted else {}
                for weight in fitted:
                    choice, matrix = self.choices[weight.name], dense[weight.name].matrix
                    work = _Work(weight, choice, matrix, self.factors, found.pop(weight.name).means(), self.method)
                    self.fits[form_named(choice.form).kind](work, new[weight.name])
            self.both.compressed_pass(self.layer)
        return new

    def _fit_of(self, weight: Weight) -> bool:
        return form_named(self.choices[weight.name].form).kind in self.fits

    def _sums(
        self, stage: Sequence[Weight], fitted: Sequence[Weight], seen: Seen, dense: "Mapping[str, _Dense]"
    ) -> dict[str, "_Sums"]:
        """What weights that read one input are fitted with, from a run of the compressed layer as far as them."""
        found: dict[str, _Sums] = {}
        counts = {weight.name: self.factors.tokens(weight) for weight in fitted}
        for at, (x, lost) in enumerate(self.both.inputs_of(self.layer, stage, seen)):
            part = self.both.parts[at]
            for weight in fitted:
                if lost is None:
                    missing = seen.read[stage[0].name][at].to(x.device).reshape_as(x).float() - x.float()
                else:
                    wrote = seen.written[weight.name][at].to(x.device).view_as(lost)
                    missing = dense[weight.name].product(wrote).float() + lost
                if weight.name not in found:
                    found[weight.name] = _Sums(x.shape[1], missing.shape[1], x.device)
                found[weight.name].add(x, missing, counts[weight.name][part].flatten().to(x.device))
        return found


@dataclass(frozen=True, eq=False)
class _Dense:
    """A weight of the dense model: W, shape ``(out, in)``, and its bias."""

    matrix: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, model: nn.Module, weight: Weight) -> "_Dense":
        return cls(read_weight(model, weight.name), linear_at(model, weight.name).bias)

    def product(self, output: Tensor) -> Tensor:
        """W x of what the weight has written."""
        return output if self.bias is None else output - self.bias


@contextmanager
def _swapped(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    before = {name: model.get_submodule(name) for name in modules}
    try:
        for name, module in modules.items():
            model.set_submodule(name, module)
        yield
    finally:
        for name, module in before.items():
            model.set_submodule(name, module)


@dataclass(frozen=True, eq=False)
class _Means:
    """What a weight is fitted with, means over the tokens, float64.

    Attributes:
        square: S = E[x' x'^T] of its inputs x' in the compressed model, shape ``(in, in)``.
        cross: E[m x'^T]: m is the dense input less x' for a weight inside a layer, shape ``(in, in)``; for one that
            writes, its dense output without the bias and what the residual stream has lost, shape ``(out, in)``.
        scale: E[|x'|], shape ``(in,)``.
        tokens: how many there were.
    """

    square: Tensor
    cross: Tensor
    scale: Tensor
    tokens: int

    def moments(self, gradients: Tensor) -> Moments:
        """S in place of the dense model's moment of the inputs."""
        return Moments(self.square.float(), gradients, self.scale.float())

    def solved(self, missing: Tensor) -> Tensor:
        """Times (S + D)^-1."""
        more = max(1.0, TOKENS * len(self.square) / self.tokens)
        return torch.cholesky_solve(missing.T, cholesky(damped(self.square, more * MEAN, more * OWN))).T


class _Sums:
    """Sums over the tokens of the windows: float64 on a CPU, float32 on a GPU."""

    def __init__(self, inputs: int, targets: int, device: torch.device) -> None:
        kind = torch.float64 if device.type == "cpu" else torch.float32
        self.square = torch.zeros(inputs, inputs, dtype=kind, device=device)
        self.cross = torch.zeros(targets, inputs, dtype=kind, device=device)
        self.scale = torch.zeros(inputs, dtype=kind, device=device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.tokens = 0

    def add(self, x: Tensor, missing: Tensor, counts: Tensor) -> None:
        """Some windows: x ``(tokens, in)``, m ``(tokens, out)``, how much each token counts ``(tokens,)``."""
        roots = counts.sqrt()[:, None]
        rows, columns = x.float() * roots, missing * roots
        with tf32_products(x):
            self.square += rows.T @ rows
            self.cross += columns.T @ rows
        self.scale += x.float().abs().T @ counts
        self.count += counts.sum(dtype=torch.float64)
        self.tokens += len(x)

    def means(self) -> _Means:
        total = self.count.clamp_min(torch.finfo(torch.float32).tiny)
        square, cross, scale = (part.double() / total for part in (self.square, self.cross, self.scale))
        return _Means(square, cross, scale, self.tokens)


@dataclass(frozen=True, eq=False)
class _Work:
    """One weight being fitted."""

    weight: Weight
    choice: WeightChoice
    dense: Tensor
    factors: LayerFactors
    found: _Means
    method: Method

    @cached_property
    def turn(self) -> Tensor:
        """T of a weight inside a layer."""
        eye = torch.eye(len(self.found.square), dtype=torch.float64, device=self.found.square.device)
        return eye + STEP * self.found.solved(self.found.cross)

    def matrix(self, before: Tensor) -> Tensor:
        """What a matrix ``(out, in)`` that reads x' becomes, float64."""
        before = before.detach().double()
        if not self.weight.writes:
            return before @ self.turn
        return before + self.found.solved(self.found.cross - before @ self.found.square)


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
    module.first.weight.copy_(module.first.weight.double() @ work.turn)


def _second_only(work: _Work, module: nn.Module) -> None:
    """SVD-LLM's closed-form update: ``W S A^T (A S A^T)^-1``."""
    assert isinstance(module, LowRankLinear)
    first = module.first.weight.double()
    square = work.found.square
    gram = damped(first @ square @ first.T, 1e-9)
    right = first @ square @ work.dense.double().T
    module.second.weight.copy_(torch.cholesky_solve(right, cholesky(gram)).T)


# How each kind of form takes a fitted weight; kinds that are left out are not fitted.
REFITS: Mapping[str, Mapping[str, Callable[[_Work, nn.Module], None]]] = MappingProxyType(
    {
        "residual": {
            "dense": _whole,
            "low_rank": _low_rank,
            "narrow": _whole,
            "head_dim": _whole,
            "grouped": _first_only,
        },
        "update": {"low_rank": _second_only},
    }
)


def _truncated_again(work: _Work) -> tuple[Tensor, Tensor]:
    """``(second (out, rank), first (rank, in))``.

    Of a weight inside a layer W T is known by its factors B A T, and the metric of its outputs by the gains
    c = diag(B^T G B): with F = diag(c)^1/2 A T and U the leading eigenvectors of F S F^T the best rank-r weight is
    B diag(c)^-1/2 U U^T F. So G itself, which for gate and up is the largest statistic, is not needed. B A is W as
    precisely as the factors are kept, in the model's dtype.
    """
    rank = work.choice.dim
    if work.weight.writes:
        moments = work.found.moments(work.factors.gradients(work.weight))
        return decompose(work.matrix(work.dense), work.method.metric(moments)).factors(rank)
    second, first = (factor.double() for factor in work.factors.every_rank(work.weight))
    gains = work.factors.gains(work.weight)
    least = gains.max() * 1e-24
    roots = gains.clamp_min(torch.where(least > 0, least, torch.ones_like(least))).sqrt()
    turned = roots[:, None] * (first @ work.turn)
    inputs = work.method.inputs(work.found.moments(work.dense))
    _, vectors = eigh(turned @ inputs @ turned.T)
    return balanced(second @ (vectors[:, :rank] / roots[:, None]), vectors[:, :rank].T @ turned)
