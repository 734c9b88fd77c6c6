"""Statistics of layers: what is kept of them, and what when a run is cut short."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gac.core.errors import ModelError
from gac.measurement import calibration
from gac.measurement.calibration import LayerMoments, stream_moments, stream_second
from gac.measurement.layerwise import LayerwiseBackward
from gac.measurement.store import StatisticsStore
from tests.measurement.runs import WINDOWS, run_of, sites_of


def stream(model: LlamaForCausalLM, folder: Path | None = None, below: int = 99) -> Iterator[Any]:
    """The moments of the layers below one."""
    return stream_moments(run_of(model, folder), [site for site in sites_of(model) if site.layer < below])


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundaries are written below every layer, and no moments are."""
    monkeypatch.setattr(calibration, "SNAPSHOT_SECONDS", -1.0)
    monkeypatch.setattr(calibration, "LAYER_BYTES", 0)


def test_the_loss_is_the_models_own(tiny_model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        expected = tiny_model(WINDOWS, labels=WINDOWS).loss.item()
    found = dict(stream(tiny_model))
    assert {moments.loss for moments in found.values()} == {found[0].loss}
    assert found[0].loss == pytest.approx(expected, rel=1e-5)


def test_the_model_is_left_as_it_was(tiny_model: LlamaForCausalLM) -> None:
    dict(stream(tiny_model.train()))
    assert tiny_model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in tiny_model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in tiny_model.modules())


def test_finished_layers_are_read_back_and_not_measured(
    tiny_model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = dict(stream(tiny_model, tmp_path))
    monkeypatch.setattr(calibration, "_measure", lambda *_: pytest.fail("measured again"))
    again = dict(stream(tiny_model, tmp_path))
    assert all(torch.equal(again[0].tensors[name], tensor) for name, tensor in first[0].tensors.items())


def test_an_interrupted_calibration_goes_on_below_the_last_finished_layer(
    tiny_config: LlamaConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshots: None
) -> None:
    tiny_config.num_hidden_layers = 5
    model, store = LlamaForCausalLM(tiny_config).eval(), StatisticsStore(tmp_path)
    whole = dict(stream(model))
    begun = stream(model, tmp_path)
    assert [next(begun)[0] for _ in range(3)] == [4, 3, 2]
    begun.close()
    ran, through = [], LayerwiseBackward.through
    monkeypatch.setattr(LayerwiseBackward, "through", lambda self, at, tick: ran.append(at) or through(self, at, tick))
    resumed = dict(stream(model, tmp_path, below=3))
    assert ran == [2, 1, 0]  # the boundary below layer 3 was the last to be written
    assert not store.boundary.exists()
    assert all(torch.equal(resumed[1].tensors[name], tensor) for name, tensor in whole[1].tensors.items())


def test_a_boundary_below_a_layer_that_is_wanted_is_not_used(
    tiny_model: LlamaForCausalLM, tmp_path: Path, snapshots: None
) -> None:
    store = StatisticsStore(tmp_path)
    begun = stream(tiny_model, tmp_path)
    next(begun), next(begun)
    begun.close()
    assert store.boundary.exists()
    assert sorted(dict(stream(tiny_model, tmp_path))) == [0, 1]


def test_a_model_whose_loss_is_nan_is_refused(tiny_model: LlamaForCausalLM, tmp_path: Path) -> None:
    with torch.no_grad():
        tiny_model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match=r"the loss of calibration window 0 is nan; expected a finite loss"):
        dict(stream(tiny_model, tmp_path))
    assert list(tmp_path.iterdir()) == []


Moments = dict[int, LayerMoments]


class Pair:
    """A dense model of four layers and one beside it that is a little different, with a store for each."""

    def __init__(self, config: LlamaConfig, folder: Path) -> None:
        config.num_hidden_layers = 4
        torch.manual_seed(0)
        self.dense = LlamaForCausalLM(config).eval()
        self.first = copy.deepcopy(self.dense)
        with torch.no_grad():
            for parameter in self.first.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        self.sites = sites_of(self.dense)
        self.runs = run_of(self.dense, folder / "one"), run_of(self.first, folder / "two")
        self.stores = [run.store for run in self.runs]

    def alone(self, model: LlamaForCausalLM) -> Moments:
        return dict(stream_moments(run_of(model), self.sites))

    def stream(self):
        return stream_second(*self.runs, self.sites)


@pytest.fixture
def pair(tiny_config: LlamaConfig, tmp_path: Path) -> Pair:
    return Pair(tiny_config, tmp_path)


def same(one: Moments, other: Moments) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[layer].tensors[name])
        for layer, moments in one.items()
        for name, tensor in moments.tensors.items()
    )


def test_gradients_are_the_first_shots_and_inputs_the_dense_models(pair: Pair) -> None:
    both = dict(pair.stream())[2].tensors
    dense, first = (pair.alone(model)[2].tensors for model in (pair.dense, pair.first))
    for what in ("inputs/0", "scale", "gradients/1", "tokens"):
        name = f"{what}/model.layers.2.mlp.up_proj"
        assert torch.equal(both[name], (first if what in ("gradients/1", "tokens") else dense)[name])
        assert not torch.equal(first[name], dense[name])
    assert both["loss"] == dense["loss"]


@pytest.mark.parametrize(("dense", "first"), [((), (1, 3)), ((2,), (0,))])
def test_layers_meet_whichever_of_them_are_kept(pair: Pair, dense: tuple[int, ...], first: tuple[int, ...]) -> None:
    whole = dict(pair.stream())
    for store, kept in zip(pair.stores, (dense, first), strict=True):
        for layer in {0, 1, 2, 3} - {*kept}:
            store.path("layer", layer).unlink()
    again = list(pair.stream())
    assert [layer for layer, _ in again] == [3, 2, 1, 0]
    assert same(dict(again), whole)


def test_an_interrupted_run_goes_on_in_both_models(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dict(pair.stream())
    for store in pair.stores:
        for layer in range(4):
            store.path("layer", layer).unlink()
    monkeypatch.setattr(calibration, "SNAPSHOT_SECONDS", -1.0)
    monkeypatch.setattr(calibration, "LAYER_BYTES", 0)
    stream = pair.stream()
    begun = [next(stream) for _ in range(3)]
    stream.close()
    assert [layer for layer, _ in begun] == [3, 2, 1]
    assert all(store.boundary.exists() for store in pair.stores)
    ran, through = [], LayerwiseBackward.through
    monkeypatch.setattr(LayerwiseBackward, "through", lambda self, at, tick: ran.append(at) or through(self, at, tick))
    pair.sites = tuple(site for site in pair.sites if site.layer < 2)
    assert same(dict(pair.stream()), {layer: whole[layer] for layer in (0, 1)})
    assert ran == [1, 1, 0, 0]  # the boundary below layer 2 was the last to be written, in both
    assert not any(store.boundary.exists() for store in pair.stores)
