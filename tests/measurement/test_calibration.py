"""Statistics and factors of layers: what is kept of them and read again, and what when a run is cut short."""

import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gac.core.errors import ModelError, StatisticsError
from gac.core.linalg import add_square, at_once, cpu_threads, eigh, mirrored, packed, unpacked
from gac.forms import FORMS
from gac.forms.decomposition import decompose
from gac.forms.low_rank.torch import every_rank
from gac.forms.narrow.elimination import eliminate, last_to_go
from gac.measurement import calibration, curves, sums
from gac.measurement.calibration import stream_moments, stream_second
from gac.measurement.curves import fit_layers, measure_curves
from gac.measurement.layerwise import LayerwiseBackward
from gac.measurement.moments import LayerMoments
from gac.measurement.store import CPU, StatisticsStore, TensorFile, background_writer
from gac.measurement.sums import parts_of
from gac.models.families import family_of
from gac.testing.models import tiny_config
from tests.measurement.runs import WINDOWS, run_of, sites_of


def stream(model: LlamaForCausalLM, folder: Path | None = None, below: int = 99) -> Iterator[Any]:
    """The moments of the layers below one."""
    return stream_moments(run_of(model, folder), [site for site in sites_of(model) if site.layer < below])


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundaries are written below every layer, and no moments are."""
    monkeypatch.setattr(calibration, "SNAPSHOT_SECONDS", -1.0)
    monkeypatch.setattr(calibration, "LAYER_BYTES", 0)


@pytest.fixture
def layers_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that gradients went through."""
    ran, through = list[int](), LayerwiseBackward.through
    monkeypatch.setattr(LayerwiseBackward, "through", lambda self, at, tick: ran.append(at) or through(self, at, tick))
    return ran


def test_the_loss_is_the_models_own_and_the_model_is_left_as_it_was(tiny_model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        expected = tiny_model(WINDOWS, labels=WINDOWS).loss.item()
    found = dict(stream(tiny_model))
    assert {moments.loss for moments in found.values()} == {found[0].loss}
    assert found[0].loss == pytest.approx(expected, rel=1e-5)
    dict(stream(tiny_model.train()))
    assert tiny_model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in tiny_model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in tiny_model.modules())


def test_finished_layers_are_read_back(tiny_model: LlamaForCausalLM, tmp_path: Path, monkeypatch: Any) -> None:
    first = dict(stream(tiny_model, tmp_path))
    monkeypatch.setattr(calibration, "_measure", lambda *_: pytest.fail("measured again"))
    again = dict(stream(tiny_model, tmp_path))
    assert all(torch.equal(again[0].tensors[name], tensor) for name, tensor in first[0].tensors.items())


@pytest.mark.usefixtures("snapshots")
def test_an_interrupted_calibration_goes_on(tiny_config: LlamaConfig, tmp_path: Path, layers_run: list[int]) -> None:
    tiny_config.num_hidden_layers = 5
    model, store = LlamaForCausalLM(tiny_config).eval(), StatisticsStore(tmp_path)
    whole = dict(stream(model))
    begun = stream(model, tmp_path)
    assert [next(begun)[0] for _ in range(3)] == [4, 3, 2]
    begun.close()
    layers_run.clear()
    resumed = dict(stream(model, tmp_path, below=3))
    assert layers_run == [2, 1, 0]  # the boundary below layer 3 was the last to be written
    assert not store.boundary.exists()
    assert all(torch.equal(resumed[1].tensors[name], tensor) for name, tensor in whole[1].tensors.items())


@pytest.mark.usefixtures("snapshots")
def test_a_boundary_below_a_wanted_layer_is_not_used(tiny_model: LlamaForCausalLM, tmp_path: Path) -> None:
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


def test_an_interrupted_run_goes_on_in_both(pair: Pair, layers_run: list[int], request: pytest.FixtureRequest) -> None:
    whole = dict(pair.stream())
    for store in pair.stores:
        for layer in range(4):
            store.path("layer", layer).unlink()
    request.getfixturevalue("snapshots")
    stream = pair.stream()
    begun = [next(stream) for _ in range(3)]
    stream.close()
    assert [layer for layer, _ in begun] == [3, 2, 1]
    assert all(store.boundary.exists() for store in pair.stores)
    layers_run.clear()
    pair.sites = tuple(site for site in pair.sites if site.layer < 2)
    assert same(dict(pair.stream()), {layer: whole[layer] for layer in (0, 1)})
    assert layers_run == [1, 1, 0, 0]  # the boundary below layer 2 was the last to be written, in both
    assert not any(store.boundary.exists() for store in pair.stores)


SITES = family_of(tiny_config()).sites(tiny_config())
NARROW = FORMS.get("narrow")
VALUE = next(weight for site in SITES for weight in site.weights if site.layer == 1 and weight.values == "out")


@pytest.mark.parametrize("size", [1, 512, 1300])
def test_a_packed_matrix_comes_back(size: int) -> None:
    rows = torch.randn(8, size)
    matrix = rows.T @ rows
    matrix = (matrix + matrix.T) / 2
    assert packed(matrix).numel() <= (size + 512) * size // 2 + 512 * 512
    assert torch.equal(unpacked(packed(matrix), size), matrix)


def test_eigenvectors_that_do_not_converge_are_found_by_another_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(20, 12, dtype=torch.float64)
    values, vectors = eigh(rows.T @ rows)

    for failing in (
        Mock(side_effect=torch.linalg.LinAlgError("failed to converge")),
        Mock(return_value=(values, torch.full_like(vectors, torch.nan))),
    ):
        monkeypatch.setattr(torch.linalg, "eigh", failing)
        again, others = eigh(rows.T @ rows)
        assert torch.allclose(again, values)
        assert torch.allclose((others.T @ vectors).abs(), torch.eye(12, dtype=torch.float64), atol=1e-8)


@pytest.mark.parametrize(("size", "kind"), [(1, torch.float64), (128, torch.float32), (300, torch.float64)])
def test_squares_are_summed_whole(size: int, kind: torch.dtype) -> None:
    parts = torch.randn(2, 8, size)
    total = torch.zeros(size, size, dtype=kind)
    for rows in parts:
        add_square(total, rows)
    whole = mirrored(total)
    assert torch.equal(whole, whole.T)
    assert torch.allclose(whole.double(), sum(rows.T.double() @ rows.double() for rows in parts), atol=1e-5)


def test_the_factors_are_those_of_the_decomposition(tiny_model: LlamaForCausalLM, tmp_path: Path) -> None:
    run = run_of(tiny_model, tmp_path)
    measure_curves(run, SITES)
    kept, moments = fit_layers(run, SITES), dict(stream_moments(run, SITES))
    down = SITES[-1].weights[2]
    of_down = moments[1].of(down, run.method.pooled)
    matrix, metric = tiny_model.get_submodule(down.name).weight, run.method.metric(of_down)
    second, first = every_rank(kept[1].artifacts, down)
    expected = decompose(matrix, metric).factors(9)
    assert torch.allclose(second[:, :9] @ first[:9], (expected[0] @ expected[1]).float(), atol=1e-6)
    order = kept[1].artifacts.of(NARROW, "order", down)
    assert torch.equal(last_to_go(order, 50), last_to_go(eliminate(matrix, metric).order, 50))
    assert torch.allclose(kept[1].artifacts.moments(down).inputs, of_down.inputs, rtol=1e-5)


def test_noise_of_inputs_is_measured_for_the_schemes_that_ask(
    tiny_model: LlamaForCausalLM, tmp_path: Path, layers_run: list[int]
) -> None:
    fit_layers(run_of(tiny_model, tmp_path), SITES, schemes=["w4a16"])
    path = StatisticsStore(tmp_path).path("layer", 1)
    assert not any("noise" in name for name in TensorFile(path, CPU))
    layers_run.clear()
    priced = fit_layers(run_of(tiny_model, tmp_path), SITES, schemes=["w8a8"])
    assert layers_run == [1, 0]
    assert {name.partition("/")[0] for name in TensorFile(path, CPU) if "noise" in name} == {"int8-noise"}
    fresh = fit_layers(run_of(tiny_model), SITES, schemes=["w8a8"])
    prices = [name for name in fresh[1].losses if name.startswith("w8a8/")]
    assert prices
    assert all(np.allclose(priced[1].losses[name], fresh[1].losses[name], rtol=1e-4) for name in prices)
    layers_run.clear()
    fit_layers(run_of(tiny_model, tmp_path), SITES, schemes=["w8a8", "w4a16"])
    StatisticsStore(tmp_path).path("losses-kfac-scheme-3-w8a8", 0).unlink()
    fit_layers(run_of(tiny_model, tmp_path), SITES, schemes=["w8a8"])
    assert layers_run == []  # for moments with this noise are kept
    fit_layers(run_of(tiny_model, tmp_path), SITES, schemes=["fp8"])
    assert layers_run == [1, 0]


def test_windows_run_at_once_but_not_across_the_middle(tiny_model: LlamaForCausalLM, monkeypatch: Any) -> None:
    assert parts_of(7, 512, 4, CPU) == [slice(0, 4), slice(4, 7)]
    assert parts_of(7, 1024, 4, CPU) == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 7)]
    assert parts_of(3, 4096, 2, CPU) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert parts_of(4, 512, -3, CPU) == parts_of(4, 512, 9, CPU) == [slice(0, 4)]
    both = dict(stream(tiny_model))
    monkeypatch.setattr(sums, "CPU_TOKENS", 1)
    each = dict(stream(tiny_model))
    for layer, moments in both.items():
        for name, tensor in moments.tensors.items():
            assert torch.allclose(tensor, each[layer].tensors[name], rtol=1e-3, atol=1e-5 * float(tensor.abs().max()))


def test_work_that_is_shared_out_is_the_same_in_one_thread() -> None:
    squares = [rows.T @ rows for rows in torch.randn(5, 40, 24)]
    threads = torch.get_num_threads()
    with cpu_threads(2):
        both = at_once(eigh, squares, squares)
        with pytest.raises(ModelError, match="not finite"):
            at_once(eigh, [*squares, torch.full((2, 2), torch.nan)], squares)
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == threads
    with cpu_threads(1):
        each = [eigh(square) for square in squares]
    assert all(map(torch.equal, chain(*both), chain(*each)))


def test_the_first_layer_tells_what_all_take(tiny_model: LlamaForCausalLM, monkeypatch: Any, caplog: Any) -> None:
    now, fit_layer = [0.0], curves.fit_layer

    def in_a_minute(*args: Any) -> Any:
        now[0] += 60
        return fit_layer(*args)

    monkeypatch.setattr(curves, "fit_layer", in_a_minute)
    monkeypatch.setattr(curves, "time", SimpleNamespace(monotonic=lambda: now[0]))
    caplog.set_level(logging.INFO, "gac")
    fit_layers(replace(run_of(tiny_model), progress=True), SITES)
    assert "then the layers are decomposed, and the first one shows how long that takes" in caplog.text
    assert caplog.text.count("decomposing 2 layers, in all their forms: about 2.0 minutes") == 1
    caplog.clear()
    fit_layers(run_of(tiny_model), SITES)
    assert not caplog.records


def test_folding_keeps_the_moments_of_values_and_the_models_dtype(tiny_model: LlamaForCausalLM) -> None:
    fit = fit_layers(run_of(tiny_model.to(torch.bfloat16), method="palu-fold"), SITES)[1]
    assert fit.artifacts.moments(VALUE).inputs.shape == (VALUE.in_features, VALUE.in_features)
    assert fit.artifacts.moments(VALUE).inputs.dtype == torch.float32
    assert f"latent:1/{VALUE.name}" not in fit.losses
    assert {factor.dtype for factor in every_rank(fit.artifacts, SITES[-1].weights[0])} == {torch.bfloat16}


def test_kept_layers_are_not_measured_but_where_factors_are_gone(tiny_model: LlamaForCausalLM, tmp_path: Path) -> None:
    store = StatisticsStore(tmp_path)
    first = measure_curves(run_of(tiny_model, tmp_path), SITES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "stream_moments", lambda *_: pytest.fail("measured again"))
        again = measure_curves(run_of(tiny_model, tmp_path), SITES)
    assert again.dense_loss == first.dense_loss
    assert again.curves.by_key.keys() == first.curves.by_key.keys()
    store.path("factors-kfac-standard", 0).unlink()
    assert list(fit_layers(run_of(tiny_model, tmp_path), SITES)) == [1, 0]
    assert store.path("factors-kfac-standard", 0).exists()


def test_what_cannot_be_written_is_said_and_tensors_wait_for_the_files_before_them(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StatisticsError, match=r"in it: .* File exists"), background_writer() as write:
        write({tmp_path / "file" / "in it": {"one": torch.ones(1)}})

    class Late(dict[str, torch.Tensor]):
        """Says when its tensors are taken."""

        def items(self) -> Any:
            assert (tmp_path / "before").exists()
            return super().items()

    with background_writer() as write:
        write({tmp_path / "before": {"many": torch.ones(10**6)}})
        write({tmp_path / "after": Late(one=torch.ones(1))})
    assert (tmp_path / "after").exists()
