"""What is kept of a layer: enough to compress it, and read instead of measured."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from gac.core.errors import StatisticsError
from gac.core.linalg import add_square, eigh, mirrored, packed, unpacked
from gac.forms import FORMS
from gac.forms.decomposition import decompose
from gac.forms.low_rank.torch import every_rank
from gac.forms.narrow.elimination import eliminate, last_to_go
from gac.measurement import curves
from gac.measurement.calibration import stream_moments
from gac.measurement.curves import fit_layers, measure_curves
from gac.measurement.store import StatisticsStore, background_writer
from gac.models.families import family_of
from gac.testing.models import tiny_config
from tests.measurement.runs import run_of

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

    def fail(_matrix: torch.Tensor) -> None:
        raise torch.linalg.LinAlgError("failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
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


def test_the_first_layer_tells_what_all_will_take(
    tiny_model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_folding_keeps_the_moments_of_the_values_and_factors_have_the_models_dtype(
    tiny_model: LlamaForCausalLM,
) -> None:
    fit = fit_layers(run_of(tiny_model.to(torch.bfloat16), method="palu-fold"), SITES)[1]
    assert fit.artifacts.moments(VALUE).inputs.shape == (VALUE.in_features, VALUE.in_features)
    assert fit.artifacts.moments(VALUE).inputs.dtype == torch.float32
    assert f"latent:1/{VALUE.name}" not in fit.losses
    assert {factor.dtype for factor in every_rank(fit.artifacts, SITES[-1].weights[0])} == {torch.bfloat16}


def test_kept_layers_are_not_measured(
    tiny_model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measure_curves(run_of(tiny_model, tmp_path), SITES)
    monkeypatch.setattr(curves, "stream_moments", lambda *_: pytest.fail("measured again"))
    again = measure_curves(run_of(tiny_model, tmp_path), SITES)
    assert again.dense_loss == first.dense_loss
    assert again.curves.by_key.keys() == first.curves.by_key.keys()


def test_a_layer_whose_factors_are_gone_is_measured_again(tiny_model: LlamaForCausalLM, tmp_path: Path) -> None:
    store = StatisticsStore(tmp_path)
    measure_curves(run_of(tiny_model, tmp_path), SITES)
    store.path("factors-kfac-standard", 0).unlink()
    assert list(fit_layers(run_of(tiny_model, tmp_path), SITES)) == [1, 0]
    assert store.path("factors-kfac-standard", 0).exists()


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StatisticsError, match=r"in it: .* File exists"), background_writer() as write:
        write({tmp_path / "file" / "in it": {"one": torch.ones(1)}})


def test_tensors_wait_for_the_files_before_them(tmp_path: Path) -> None:
    class Late(dict[str, torch.Tensor]):
        """Says when its tensors are taken."""

        def items(self) -> Any:
            assert (tmp_path / "before").exists()
            return super().items()

    with background_writer() as write:
        write({tmp_path / "before": {"many": torch.ones(10**6)}})
        write({tmp_path / "after": Late(one=torch.ones(1))})
    assert (tmp_path / "after").exists()
