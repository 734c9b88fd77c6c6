"""Statistics against plain autograd, and what is kept when a run is cut short."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from gac.errors import ModelError
from gac.models.families import family_of
from gac.sensitivity import calibration
from gac.sensitivity.calibration import StatisticsStore, stream_moments
from gac.sites import Site


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
    for window in windows:
        kept: list[Tensor] = []
        handle = module.register_forward_hook(lambda _m, i, o, kept=kept: kept.extend([i[0], o]))
        logits = tiny_model(window[None]).logits
        handle.remove()
        loss = F.cross_entropy(logits[0, :-1], window[1:], reduction="sum")
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


def test_chunks_of_layers_give_what_one_pass_gives(
    tiny_model: LlamaForCausalLM, sites: tuple[Site, ...], windows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measured(tiny_model, sites, windows)
    monkeypatch.setattr(calibration, "CHUNK_BYTES", 1)
    parts = measured(tiny_model, sites, windows)
    for layer, moments in whole.items():
        for name, tensor in moments.tensors.items():
            assert torch.equal(parts[layer].tensors[name], tensor)


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
    monkeypatch.setattr(calibration, "_backward", lambda *_: pytest.fail("measured again"))
    again = measured(tiny_model, sites, windows, store)
    assert all(torch.equal(again[0].tensors[name], tensor) for name, tensor in first[0].tensors.items())


def test_an_interrupted_calibration_goes_on_where_it_stopped(
    tiny_model: LlamaForCausalLM,
    sites: tuple[Site, ...],
    windows: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = measured(tiny_model, sites, windows)
    monkeypatch.setattr(calibration, "SNAPSHOT_SECONDS", -1.0)
    backward, seen = calibration._backward, []

    def stops_at_the_third(model: LlamaForCausalLM, ids: Tensor, index: int) -> Tensor:
        if index == 2 and len(seen) == 2:
            seen.append(-1)
            raise KeyboardInterrupt
        seen.append(index)
        return backward(model, ids, index)

    monkeypatch.setattr(calibration, "_backward", stops_at_the_third)
    store = StatisticsStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        measured(tiny_model, sites, windows, store)
    resumed = measured(tiny_model, sites, windows, store)
    assert seen == [0, 1, -1, 2]
    assert not store.partial.exists()
    assert all(torch.equal(resumed[1].tensors[name], tensor) for name, tensor in whole[1].tensors.items())


def test_a_model_whose_loss_is_nan_is_refused(
    tiny_model: LlamaForCausalLM, sites: tuple[Site, ...], windows: Tensor, tmp_path: Path
) -> None:
    with torch.no_grad():
        tiny_model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match=r"the loss of calibration window 0 is nan; expected a finite loss"):
        measured(tiny_model, sites, windows, StatisticsStore(tmp_path))
    assert list(tmp_path.iterdir()) == []
