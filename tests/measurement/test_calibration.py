"""Statistics of layers: what is kept of them, and what when a run is cut short."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gac.core.errors import ModelError
from gac.forms.curvature.registry import METHODS
from gac.measurement import calibration
from gac.measurement.calibration import CalibrationRun, stream_moments
from gac.measurement.layerwise import LayerwiseBackward
from gac.measurement.store import StatisticsStore, temporary_store
from gac.models.families import family_of

WINDOWS = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))


def stream(model: LlamaForCausalLM, store: StatisticsStore | None = None, below: int = 99) -> Iterator[Any]:
    """The moments of the layers below one."""
    sites = [site for site in family_of(model.config).sites(model.config) if site.layer < below]
    run = CalibrationRun(model, WINDOWS, METHODS.get("kfac"), store or temporary_store(), progress=False)
    return stream_moments(run, sites)


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
    first = dict(stream(tiny_model, StatisticsStore(tmp_path)))
    monkeypatch.setattr(calibration, "_measure", lambda *_: pytest.fail("measured again"))
    again = dict(stream(tiny_model, StatisticsStore(tmp_path)))
    assert all(torch.equal(again[0].tensors[name], tensor) for name, tensor in first[0].tensors.items())


def test_an_interrupted_calibration_goes_on_below_the_last_finished_layer(
    tiny_config: LlamaConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshots: None
) -> None:
    tiny_config.num_hidden_layers = 5
    model, store = LlamaForCausalLM(tiny_config).eval(), StatisticsStore(tmp_path)
    whole = dict(stream(model))
    begun = stream(model, store)
    assert [next(begun)[0] for _ in range(3)] == [4, 3, 2]
    begun.close()
    ran, through = [], LayerwiseBackward.through
    monkeypatch.setattr(LayerwiseBackward, "through", lambda self, at, tick: ran.append(at) or through(self, at, tick))
    resumed = dict(stream(model, store, below=3))
    assert ran == [2, 1, 0]  # the boundary below layer 3 was the last to be written
    assert not store.boundary.exists()
    assert all(torch.equal(resumed[1].tensors[name], tensor) for name, tensor in whole[1].tensors.items())


def test_a_boundary_below_a_layer_that_is_wanted_is_not_used(
    tiny_model: LlamaForCausalLM, tmp_path: Path, snapshots: None
) -> None:
    store = StatisticsStore(tmp_path)
    begun = stream(tiny_model, store)
    next(begun), next(begun)
    begun.close()
    assert store.boundary.exists()
    assert sorted(dict(stream(tiny_model, store))) == [0, 1]


def test_a_model_whose_loss_is_nan_is_refused(tiny_model: LlamaForCausalLM, tmp_path: Path) -> None:
    with torch.no_grad():
        tiny_model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match=r"the loss of calibration window 0 is nan; expected a finite loss"):
        dict(stream(tiny_model, StatisticsStore(tmp_path)))
    assert list(tmp_path.iterdir()) == []
