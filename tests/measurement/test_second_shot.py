"""Inputs of one model beside gradients of another, layer by layer, whatever of either is kept already."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gac.forms.curvature.registry import METHODS
from gac.measurement import calibration
from gac.measurement.calibration import CalibrationRun, LayerMoments, stream_moments, stream_second
from gac.measurement.layerwise import LayerwiseBackward
from gac.measurement.store import StatisticsStore, temporary_store
from gac.models.families import family_of

WINDOWS = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))

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
        self.sites = family_of(config).sites(config)
        self.stores = StatisticsStore(folder / "one"), StatisticsStore(folder / "two")

    def run(self, model: LlamaForCausalLM, store: StatisticsStore) -> CalibrationRun:
        return CalibrationRun(model, WINDOWS, METHODS.get("kfac"), store, progress=False)

    def alone(self, model: LlamaForCausalLM) -> Moments:
        return dict(stream_moments(self.run(model, temporary_store()), self.sites))

    def stream(self):
        return stream_second(*map(self.run, (self.dense, self.first), self.stores), self.sites)


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
