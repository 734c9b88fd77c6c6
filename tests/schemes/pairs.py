"""A pair of a random weight, with what was seen of it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gac.forms import form_named
from gac.forms.artifacts import LayerArtifacts
from gac.forms.curvature.methods import Kfac
from gac.forms.curvature.metric import Moments
from gac.forms.tensors import Statistics, tensors_of
from gac.models.sites import Weight
from gac.runtime.storage.eight_bits import READERS
from gac.schemes import scheme_named


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def errors_of(name: str, x: Tensor) -> Tensor:
    numbers, scale = READERS[scheme_named(name).input_quantiser or ""](x)
    return (numbers * scale - x).double()


class Plain(Kfac):
    """Moments as they are: all tokens count alike, nothing is damped."""

    name, power = "plain", 0.0

    def pooled(self, halves: Any) -> Tensor:
        return halves.mean()

    def inputs(self, moments: Moments) -> Tensor:
        return moments.inputs.double()

    def gradients(self, moments: Moments) -> Tensor:
        return moments.gradients.double()


def pair_statistics(outs: int, ins: int) -> tuple[Statistics, Weight, Tensor]:
    """Of one random weight whose inputs are normal numbers along a few strong directions; the inputs too."""
    x = normal(4096, ins) * torch.logspace(0, -1.5, ins) @ torch.linalg.qr(normal(ins, ins, seed=1))[0]
    root = normal(outs, outs, seed=2) * torch.logspace(0, -1, outs)
    model, weight = nn.Module(), Weight("w", outs, ins)
    model.w = nn.Linear(ins, outs, bias=False)
    model.w.weight.data.copy_(normal(outs, ins, seed=3))
    noise = {
        scheme_named(name).input_quantiser or "": errors_of(name, x).square().mean(0).float()
        for name in ("fp8", "w8a8")
    }
    moments = Moments(x.T @ x / len(x), root @ root.T, x.abs().mean(0), noise)
    statistics = Statistics(model, lambda _: moments, Plain(), LayerArtifacts({}))
    (fit,) = tensors_of(form_named("low_rank")).measure(statistics, [weight])
    artifacts = LayerArtifacts({f"low_rank.{tensor}/w": value for tensor, value in fit.tensors.items()})
    return replace(statistics, artifacts=artifacts), weight, x
