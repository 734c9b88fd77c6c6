"""Fitting the weights of a compressed model again, layer by layer, to what the dense model does.

A weight was truncated for the inputs that the dense model gives it; in the compressed model it reads the output of
truncated weights. So the weights of each layer are solved for again in the order in which they run, on the activations
of the model as it is compressed so far (``gac.forms.refit``). Each form says what it makes of the solution: a low-rank
pair is truncated again, in the metric of the method with the new inputs.

Errors of compressed weights spread the logits, so the model is surer of its tokens than it should be. Once its weights
are fitted, its last norm is multiplied by one number: the one at which the KL divergence of its next tokens from the
dense model's is least. This is temperature scaling (arXiv 1706.04599, section 4.2), there fitted to labels.

SVD-LLM's closed-form update (arXiv 2403.07378, section 3.2) is here too: it solves for the second factor of low-rank
weights alone. ``results/refit.md`` has what each part gives.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType

import torch
from torch import Tensor, nn

from gac.compression.apply import build_modules
from gac.compression.paired_run import PairedRun, Seen, ToStream, ways_of
from gac.compression.rounding import store, store_all
from gac.core.distributed.ranks import ALONE, Ranks
from gac.core.linalg import add_square, check_measured, fits_tf32, mirrored, tf32_products
from gac.core.progress import progress_bar, rough_duration
from gac.forms import form_named
from gac.forms.artifacts import LayerArtifacts
from gac.forms.curvature.metric import Halves
from gac.forms.refit import CompressedMeans, WeightRefit
from gac.forms.tensors import tensors_of
from gac.measurement.calibration import CalibrationRun, decoder_layers, group_by_layer, routed_by_layer
from gac.measurement.curves import LayerFit, fit_layers
from gac.measurement.sums import TINY, RunningSums, first_half
from gac.models.linears import linear_at
from gac.models.modules import frozen, last_norm_of, swapped
from gac.models.sites import Site, Weight
from gac.plan.plan import Plan, WeightChoice
from gac.plan.recipe import Refit
from gac.schemes import scheme_named

LEAST, MOST = 0.75, 1.25
"""Logits are not scaled further than that."""
logger = logging.getLogger(__name__)
SCALED_ON = 4096
"""Tokens that tell the scale of the logits well enough, in whole windows."""


def fitted_scale(pairs: Iterable[tuple[Tensor, Tensor]], ranks: Ranks = ALONE) -> float:
    """The factor of a model's logits at which its KL divergence from another model is least: one Newton step from 1.

    ``pairs`` are the other model's logits and its own, ``(tokens, vocabulary)``; each process has pairs of its own.
    """
    slope = curvature = 0.0
    for other, logits in pairs:
        chances, wanted = (logits.float().softmax(-1) for logits in (logits, other))
        centred = logits.float() - (chances * logits.float()).sum(-1, keepdim=True)
        slope -= float((wanted * centred).sum())
        curvature += float((chances * centred.square()).sum())
    total = ranks.total(torch.tensor([slope, curvature], dtype=torch.float64))
    check_measured(total, "logits that are not finite", "finite logits")
    slope, curvature = total.tolist()
    return min(max(1 - slope / curvature, LEAST), MOST) if curvature else 1.0


def scaled_norm(norm: nn.Module, factor: float) -> nn.Module:
    """A copy of an RMS or layer norm whose outputs are multiplied; of those too whose gains are 1 plus their weight."""
    copied = deepcopy(norm)
    weight = copied.get_parameter("weight")
    signs = torch.ones_like(weight)
    signs[::2] = -1
    with torch.no_grad():
        gains = (copied(signs).float() - copied(-signs).float()) / 2 * signs
        offset = (gains - weight).mean().round()
        weight.copy_(factor * (weight.float() + offset) - offset)
        if getattr(copied, "bias", None) is not None:
            copied.get_parameter("bias").mul_(factor)
    return copied


def fitted_modules(
    run: CalibrationRun,
    plan: Plan,
    sites: Sequence[Site],
    changed: Sequence[Site],
    embeddings: Mapping[str, nn.Module],
) -> dict[str, nn.Module]:
    """Build the module of every weight that changes, fitted again or quantised as the plan says.

    ``sites`` are all of the model's, as planned; ``changed`` those with a weight that changes. ModelError if a layer
    does more than add what its weights write to the residual stream.
    """
    refit_mode, forms = plan.recipe.refit or "none", plan.recipe.space.forms
    layers = {site.layer for site in changed}
    if refit_mode != "none" and (layers or embeddings):  # every layer above the first that changes is fitted again
        lowest = 0 if embeddings else min(layers)
        layers = {site.layer for site in sites if site.layer >= lowest}
    targets = [site for site in sites if site.layer in layers]
    fits = fit_layers(run, targets, forms=forms)
    modules = build_modules(run, plan.weights, changed, fits)
    if refit_mode != "none":
        return refit(run, modules, plan.weights, refit_mode, sites, fits, embeddings)
    if not any(scheme_named(choice.scheme).lossy for choice in plan.weights if choice.name in modules):
        return modules
    fits = fit_layers(run, targets, forms=forms, rounding=True)  # the inputs of all weights too
    return store_all(run, modules, plan.weights, targets, fits)


def refit(
    run: CalibrationRun,
    modules: Mapping[str, nn.Module],
    weights: Sequence[WeightChoice],
    mode: Refit,
    sites: Sequence[Site],
    fits: Mapping[int, LayerFit],
    ends: Mapping[str, nn.Module] = MappingProxyType({}),
) -> dict[str, nn.Module]:
    """The modules of compressed weights fitted again, and fitted copies of the others and of the last norm.

    The model is as it was when this returns or raises.

    Args:
        modules: the new module of every weight that changes, by name; what they hold is changed.
        sites: all of the model's, as planned.
        fits: what was measured of each layer, from the first that changes on.
        ends: embedding and head of the compressed model, by name, where they are rounded: all layers make up for that.
    """
    if not modules and not ends:
        return {}
    layers = group_by_layer(sites)
    changed = (site.layer for site in sites if any(weight.name in modules for weight in site.weights))
    lowest = 0 if ends else min(changed)
    routed = routed_by_layer(sites)
    model = run.model
    ways = ways_of(model, [weight for of_layer in layers.values() for weight in of_layer])
    cut = first_half(len(run.windows)) - run.rows.start
    both = PairedRun(model, decoder_layers(model, layers), run.windows[run.rows], ways, ends, cut)
    choices = {choice.name: choice for choice in weights}
    fitted = dict(modules)
    with frozen(model), torch.no_grad():
        both.start(lowest)
        begun = time.monotonic()
        for layer in progress_bar("refitting", "layer", steps=range(lowest, len(layers)), shown=run.progress):
            fewer = {each.name: modules[each.name] for each in routed.get(layer, ()) if each.name in modules}
            work = _LayerWork(run, both, ways, layer, layers[layer], choices, fits[layer].artifacts, mode, fewer)
            fitted |= work.run(modules)
            if layer == lowest and run.progress:
                many = len(layers) - lowest
                logger.info("refitting %d layers: %s", many, rough_duration(many * (time.monotonic() - begun)))
        if mode == "residual" and (name := last_norm_of(model)) is not None:
            scale = fitted_scale(both.logits(_spaced(run)), run.ranks)
            fitted[name] = scaled_norm(model.get_submodule(name), scale)
    for name, module in fitted.items():
        dense = model.get_submodule(name)
        module.train(dense.training).requires_grad_(next(dense.parameters()).requires_grad)
    return fitted


def _spaced(run: CalibrationRun) -> Iterator[int]:
    """Take this process's windows of those, in even steps, that tell the scale of the logits."""
    rows, most = run.rows, -(-SCALED_ON // run.windows.shape[1])
    steps = range(0, len(run.windows), -(-len(run.windows) // most))
    return (window - rows.start for window in steps if rows.start <= window < rows.stop)


@dataclass(frozen=True, eq=False)
class _LayerWork:
    """Fit one layer; each of several processes solves for some weights, and gives them to the others."""

    calibration: CalibrationRun
    both: PairedRun
    ways: Mapping[str, ToStream]
    layer: int
    weights: Sequence[Weight]
    choices: Mapping[str, WeightChoice]
    artifacts: LayerArtifacts
    mode: Refit
    routed: Mapping[str, nn.Module]  # routers and experts of the compressed model, which are not fitted

    @property
    def model(self) -> nn.Module:
        return self.calibration.model

    def run(self, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        stages = [list(stage) for _, stage in groupby(self.weights, lambda weight: weight.input_group or weight.name)]
        seen = self.both.dense_pass(self.layer, stages)
        dense = {weight.name: linear_at(self.model, weight.name) for weight in self.weights}
        refits = {w.name: tensors_of(form_named(self.choices[w.name].form)).refit(self.mode, w) for w in self.weights}
        new = {
            name: modules.get(name) or deepcopy(self.model.get_submodule(name))
            for name, fit in refits.items()
            if name in modules or fit
        }
        with swapped(self.model, {**new, **self.routed}):
            for stage in stages:
                fitted = [weight for weight in stage if refits[weight.name]]
                sums = self._sums(stage, fitted, seen, dense) if fitted else {}
                solved: dict[str, nn.Module] = {}
                for weight in self._solved_here(stage, sums):
                    name, fit = weight.name, refits[weight.name]
                    if fit is not None:
                        solved[name] = self._solved(weight, new[name], dense[name], fit, sums.pop(name).means())
                    elif name in new:
                        solved[name] = store(scheme_named(self.choices[name].scheme), new[name])
                for name, module in self.calibration.ranks.modules(solved).items():
                    new[name] = module
                    self.model.set_submodule(name, module)
            self.both.compressed_pass(self.layer)
        return new

    def _solved_here(self, stage: Sequence[Weight], sums: dict[str, "_Sums"]) -> list[Weight]:
        """Return the weights of a stage that this process solves for, and bring it their sums."""
        ranks = self.calibration.ranks
        owners = ranks.shared_out([weight.params * weight.in_features for weight in stage])
        for weight, owner in zip(stage, owners, strict=True):
            if weight.name in sums:
                sums[weight.name].bring_to(owner, ranks)
        return [weight for weight, owner in zip(stage, owners, strict=True) if ranks.owns(owner)]

    def _solved(
        self,
        weight: Weight,
        module: nn.Module,
        linear: nn.Linear,
        fit: Callable[[WeightRefit, nn.Module], None],
        means: CompressedMeans,
    ) -> nn.Module:
        choice, artifacts, method = self.choices[weight.name], self.artifacts, self.calibration.method
        form, scheme = form_named(choice.form), scheme_named(choice.scheme)
        fit(WeightRefit(weight, form, choice.dim, linear.weight, linear.bias, artifacts, means, method), module)
        rows = artifacts.gradients(weight) if weight.scores and scheme.lossy else None
        return store(scheme, module, means.square, rows)

    def _sums(
        self, stage: Sequence[Weight], fitted: Sequence[Weight], seen: Seen, dense: Mapping[str, nn.Linear]
    ) -> dict[str, "_Sums"]:
        sums: dict[str, _Sums] = {}
        rows, half_at = self.calibration.rows, first_half(len(self.calibration.windows))
        of_windows = self.calibration.window_weights[rows, None].sqrt()  # tokens hold the root's other half
        counts = {
            weight.name: (tokens := self.artifacts.tokens(weight)[rows]).sqrt() * of_windows.to(tokens.device)
            for weight in fitted
        }
        for index, (x, lost) in enumerate(self.both.inputs_of(self.layer, stage, seen)):
            part = self.both.parts[index]
            for weight in fitted:
                if lost is None:
                    missing = seen.read[stage[0].name][index].to(x.device).reshape_as(x).float() - x.float()
                else:
                    wrote = seen.written[weight.name][index].to(x.device).view_as(lost)
                    bias = dense[weight.name].bias
                    step = self.ways[weight.name].step(wrote, lost)
                    missing = (wrote if bias is None else wrote - bias).float() + step
                if weight.name not in sums:
                    sums[weight.name] = _Sums(x.shape[1], missing.shape[1], x.device)
                half, present = int(rows.start + part.start >= half_at), self.both.present(index)
                roots = counts[weight.name][part].flatten().to(x.device)
                sums[weight.name].add(x[present], missing[present], roots[present], half)
        return sums


class _Sums(RunningSums):
    """Sums over the tokens of the windows, from which one weight is fitted."""

    def __init__(self, inputs: int, targets: int, device: torch.device) -> None:
        super().__init__(
            {
                "square/0": (inputs, inputs),
                "square/1": (inputs, inputs),
                "cross": (targets, inputs),
                "scale": (inputs,),
                "target": (targets,),
            }
        )
        self._device = device
        self.counts = torch.zeros(2, dtype=torch.float64, device=device)
        self.tokens = 0

    def __getitem__(self, name: str) -> Tensor:
        return self.total(name, self._device)

    def add(self, x: Tensor, missing: Tensor, counts: Tensor, half: int) -> None:
        roots = counts.sqrt()[:, None]
        rows, columns = x.float() * roots, missing * roots
        with tf32_products(fits_tf32(x)):
            add_square(self[f"square/{half}"], rows)
            self["cross"].add_(columns.T @ rows)
        self["scale"].add_(x.float().abs().T @ counts)
        self["target"].add_(missing.T @ counts)
        self.counts[half] += counts.sum(dtype=torch.float64)
        self.tokens += len(x)

    def bring_to(self, owner: int, ranks: Ranks) -> None:
        super().bring_to(owner, ranks)
        ranks.total_at(owner, self.counts)
        self.tokens = sum(ranks.gathered(self.tokens))

    def means(self) -> CompressedMeans:
        total = self.counts.sum().clamp_min(TINY)
        first, second = (
            mirrored(self[f"square/{half}"]).div_(count.clamp_min(TINY)).float()
            for half, count in enumerate(self.counts)
        )
        halves = Halves(first, second if self.counts[1] else None, float(self.counts[0] / total))
        cross, scale, target = (self[name].double() / total for name in ("cross", "scale", "target"))
        return CompressedMeans(halves, cross, scale, target, self.tokens)
