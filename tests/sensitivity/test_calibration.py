"""Statistics against plain autograd, and what is kept when a run is cut short."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gac.errors import ModelError
from gac.models.families import family_of
from gac.models.sites import Site
from gac.sensitivity import calibration
from gac.sensitivity.calibration import stream_moments
from gac.sensitivity.layerwise import LayerwiseBackward
from gac.sensitivity.store import StatisticsStore


@pytest.fixture
def windows() -> Tensor:
    return torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def sites(tiny_model: LlamaForCausalLM) -> tuple[Site, ...]:
    return family_of(tiny_model.config).sites(tiny_model.config)


def measured(model: LlamaForCausalLM, sites: tuple[Site, ...], windows: Tensor, store: StatisticsStore | None = None):
    return dict(stream_moments(model, sites, windows, power=1.0, store=store, progress=False))


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_moments_are_those_of_plain_autograd(
    tiny_model: LlamaForCausalLM, sites: tuple[Site, ...], windows: Tensor, power: float
) -> None:
    found = dict(stream_moments(tiny_model, sites, windows, power=power, progress=False))
    weight = sites[-1].weights[2]
    x, g = [], []
    module = tiny_model.get_submodule(weight.name)
    for seed, window in enumerate(windows):
        kept: list[Tensor] = []
        handle = module.register_forward_hook(lambda _m, i, o, kept=kept: kept.extend([i[0], o]))
        logits = tiny_model(window[None]).logits
        handle.remove()
        chances = logits[0, :-1].detach().softmax(-1)
        labels = torch.multinomial(chances, 1, generator=torch.Generator().manual_seed(seed))[:, 0]
        loss = F.cross_entropy(logits[0, :-1], labels, reduction="sum")
        x.append(kept[0][0].detach())
        g.append(torch.autograd.grad(loss, kept[1])[0][0])
    activations, gradients = torch.cat(x), torch.cat(g)
    share = gradients.norm(dim=1) ** power
    expected = (activations * share[:, None]).T @ activations / share.sum()
    moments = found[1].of(weight)
    assert torch.allclose(moments.inputs, expected, rtol=1e-4, atol=1e-6)
    assert torch.allclose(moments.scale, activations.abs().T @ share / share.sum(), rtol=1e-4, atol=1e-6)
    assert torch.allclose(moments.gradients, gradients.T @ gradients / len(gradients), rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_models_own(tiny_model: LlamaForCausalLM, sites: tuple[Site, ...], windows: Tensor) -> None:
    with torch.no_grad():
        expected = tiny_model(windows, labels=windows).loss.item()
    found = measured(tiny_model, sites, windows)
    assert {moments.loss for moments in found.values()} == {found[0].loss}
    assert found[0].loss == pytest.approx(expected, rel=1e-5)


def test_the_model_is_left_as_it_was(tiny_model: LlamaForCausalLM, sites: tuple[Site, ...], windows: Tensor) -> None:
    tiny_model.train()
    measured(tiny_model, sites, windows)
    assert tiny_model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in tiny_model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in tiny_model.modules())


def test_finished_layers_are_read_back_and_not_measured(
    tiny_model: LlamaForCausalLM,
    sites: tuple[Site, ...],
    windows: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = StatisticsStore(tmp_path)
    first = measured(tiny_model, sites, windows, store)
    monkeypatch.setattr(calibration, "_measure", lambda *_: pytest.fail("measured again"))
    again = measured(tiny_model, sites, windows, store)
    assert all(torch.equal(again[0].tensors[name], tensor) for name, tensor in first[0].tensors.items())


def test_an_interrupted_calibration_goes_on_below_the_last_finished_layer(
    tiny_config: LlamaConfig, windows: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_config.num_hidden_layers = 5
    model = LlamaForCausalLM(tiny_config).eval()
    sites = family_of(tiny_config).sites(tiny_config)
    whole = measured(model, sites, windows)
    monkeypatch.setattr(calibration, "SNAPSHOT_SECONDS", -1.0)
    monkeypatch.setattr(calibration, "LAYER_BYTES", 0)
    store = StatisticsStore(tmp_path)
    stream = stream_moments(model, sites, windows, power=1.0, store=store, progress=False)
    assert [next(stream)[0] for _ in range(3)] == [4, 3, 2]
    stream.close()
    ran, through = [], LayerwiseBackward.through
    monkeypatch.setattr(LayerwiseBackward, "through", lambda self, at, tick: ran.append(at) or through(self, at, tick))
    left = [site for site in sites if site.layer < 3]
    resumed = measured(model, tuple(left), windows, store)
    assert ran == [2, 1, 0]  # the boundary below layer 3 was the last to be written
    assert not store.boundary.exists()
    assert all(torch.equal(resumed[1].tensors[name], tensor) for name, tensor in whole[1].tensors.items())


def test_a_boundary_below_a_layer_that_is_wanted_is_not_used(
    tiny_model: LlamaForCausalLM,
    sites: tuple[Site, ...],
    windows: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = StatisticsStore(tmp_path)
    monkeypatch.setattr(calibration, "SNAPSHOT_SECONDS", -1.0)
    monkeypatch.setattr(calibration, "LAYER_BYTES", 0)
    stream = stream_moments(tiny_model, sites, windows, power=1.0, store=store, progress=False)
    next(stream), next(stream)
    stream.close()
    assert store.boundary.exists()
    assert sorted(measured(tiny_model, sites, windows, store)) == [0, 1]


def test_a_model_whose_loss_is_nan_is_refused(
    tiny_model: LlamaForCausalLM, sites: tuple[Site, ...], windows: Tensor, tmp_path: Path
) -> None:
    with torch.no_grad():
        tiny_model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match=r"the loss of calibration window 0 is nan; expected a finite loss"):
        measured(tiny_model, sites, windows, StatisticsStore(tmp_path))
    assert list(tmp_path.iterdir()) == []
