"""Moments that are kept by text, and their mixtures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gac.measurement import calibration, layerwise
from gac.measurement.calibration import CalibrationRun, TextOfMixture, stream_moments
from gac.measurement.moments import LayerMoments
from gac.measurement.runs import drawn_loss
from gac.measurement.store import StatisticsStore
from gac.runtime.storage.eight_bits import READERS
from tests.measurement.runs import run_of, sites_of

FIRST, SECOND = (torch.randint(0, 256, (4, 24), generator=torch.Generator().manual_seed(seed)) for seed in (3, 4))
PLACES = (0, 1, 4, 5), (2, 3, 6, 7)
"""Of the windows of either text in a mixture whose halves are the halves of both."""
NOISES = tuple(READERS)


@pytest.fixture(autouse=True)
def labels_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window's labels do not depend on its number."""
    monkeypatch.setattr(
        layerwise, "drawn_loss", lambda model, ids, what, seed: drawn_loss(model, ids, what, int(ids.sum()))
    )


def mixture(
    model: Any,
    folder: Path,
    weights: Sequence[float] = (1.0, 1.0),
    texts: Sequence[Tensor] = (FIRST, SECOND),
    places: Sequence[tuple[int, ...]] = PLACES,
    **options: Any,
) -> CalibrationRun:
    windows = torch.empty(sum(map(len, texts)), 24, dtype=torch.int64)
    parts = []
    for number, (ids, of_text, weight) in enumerate(zip(texts, places, weights, strict=True)):
        windows[list(of_text)] = ids
        parts.append(TextOfMixture(of_text, StatisticsStore(folder / str(number)), weight))
    return run_of(model, folder / "mixture", windows=windows, texts=tuple(parts), **options)


def moments_of(run: CalibrationRun) -> dict[int, LayerMoments]:
    return {layer: moments for layer, moments in stream_moments(run, sites_of(run.model)) if moments is not None}


def assert_close(tensor: Tensor, expected: Tensor) -> None:
    assert torch.allclose(tensor, expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))


def assert_same(some: Mapping[int, LayerMoments], others: Mapping[int, LayerMoments]) -> None:
    assert some.keys() == others.keys()
    for layer, moments in some.items():
        names = {name for name in moments.tensors if name != "losses" and "power" not in name}
        assert names == {name for name in others[layer].tensors if name != "losses" and "power" not in name}
        for name in names:
            assert_close(moments.tensors[name], others[layer].tensors[name])


@pytest.mark.parametrize("attended", [False, True])
def test_the_moments_of_a_mixture_are_those_of_all_its_windows(
    tiny_model: Any, tmp_path: Path, attended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gac.measurement.attended.held_out", lambda windows, length: [])
    run = mixture(tiny_model, tmp_path, attended=attended, readers=() if attended else NOISES)
    together = run_of(tiny_model, windows=run.windows, attended=attended, readers=run.readers)
    assert_same(moments_of(run), moments_of(together))


def test_a_text_of_twice_the_weight_counts_as_if_it_were_there_twice(tiny_model: Any, tmp_path: Path) -> None:
    weighted = moments_of(mixture(tiny_model, tmp_path, (2.0, 1.0)))
    halves = [FIRST[:2], FIRST[:2], SECOND[:2], FIRST[2:], FIRST[2:], SECOND[2:]]
    repeated = moments_of(run_of(tiny_model, windows=torch.cat(halves)))
    for layer, moments in weighted.items():
        for name in moments.tensors:
            if name.startswith(("inputs/", "gradients/", "scale/")):
                expected = repeated[layer].tensors[name]
                assert torch.allclose(
                    moments.tensors[name], expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max())
                )


def test_another_mixture_of_measured_texts_runs_no_window(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = mixture(tiny_model, tmp_path)
    losses = next(iter(moments_of(first).values())).losses
    monkeypatch.setattr(calibration, "_measure", None)
    second = mixture(tiny_model, tmp_path, (3.0, 1.0))
    assert torch.equal(next(iter(moments_of(second).values())).losses, losses)
    alone = run_of(tiny_model, tmp_path / "1", windows=SECOND)
    assert float(losses[1]) == next(iter(moments_of(alone).values())).loss
    assert second.window_weights.tolist() == [3.0, 3.0, 1.0, 1.0, 3.0, 3.0, 1.0, 1.0]


def test_a_text_of_one_window_has_no_second_half(tiny_model: Any, tmp_path: Path) -> None:
    run = mixture(tiny_model, tmp_path, texts=(FIRST, SECOND[:1]), places=((0, 1, 3, 4), (2,)))
    assert_same(moments_of(run), moments_of(run_of(tiny_model, windows=run.windows)))


def test_noise_that_not_all_texts_have_is_left_out(tiny_model: Any, tmp_path: Path) -> None:
    moments_of(run_of(tiny_model, tmp_path / "0", windows=FIRST, readers=NOISES))
    assert not any("-noise/" in name for name in moments_of(mixture(tiny_model, tmp_path))[0].tensors)
    assert any("-noise/" in name for name in moments_of(mixture(tiny_model, tmp_path, readers=NOISES))[0].tensors)
