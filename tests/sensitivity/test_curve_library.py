"""Loss curves for shapes without weights."""

import numpy as np
import pytest

from gac.curves import LossCurve
from gac.errors import ModelError
from gac.forms import FORMS
from gac.models.families import family_of
from gac.models.shapes import SHAPES
from gac.plan import Calibration
from gac.sensitivity.curve_library import CurveLibrary

LOW_RANK = FORMS.get("low_rank")
SMALL, LARGE = SHAPES["smollm2"], SHAPES["llama-3-8b"]
TEXT = Calibration("text", 2, 8, "digest", 3.0)


def library() -> CurveLibrary:
    """Every curve falls from the layer's number plus one to 0, as the square of what is cut off."""
    rows = np.stack([falling(layer, 256).loss for layer in range(30)])
    weights = {
        weight.name.rpartition(".")[2]: weight for site in family_of(SMALL).sites(SMALL) for weight in site.weights
    }
    fractions = {
        f"low_rank/{name}": LOW_RANK.params(one, LOW_RANK.full(one)) / one.params for name, one in weights.items()
    }
    fractions |= dict.fromkeys(("narrow/down_proj", "heads/o_proj", "skip/o_proj", "skip/down_proj"), 1.0)
    return CurveLibrary("small", "kfac", TEXT, dict.fromkeys(fractions, rows), fractions)


def falling(layer: int, full: int) -> LossCurve:
    return LossCurve((layer + 1) * (1 - np.arange(full + 1) / full) ** 2)


def test_a_model_of_the_same_shapes_gets_its_own_curves_back() -> None:
    sites = family_of(SMALL).sites(SMALL)
    found = library().curves_of(sites)
    for site in sites:
        for weight in site.weights:
            full = min(weight.out_features, weight.in_features)
            assert np.allclose(found.of(LOW_RANK, weight).loss, falling(site.layer, full).loss, atol=1e-3)


def test_a_larger_model_loses_as_much_at_the_same_fraction_and_depth() -> None:
    sites = family_of(LARGE).sites(LARGE)
    found = library().curves_of(sites)
    assert found.by_key["low_rank", "bf16", "model.layers.0.self_attn.q_proj"].loss[2048] == pytest.approx(
        0.25, abs=1e-3
    )
    last = found.by_key["narrow", "bf16", "model.layers.31.mlp.down_proj"].loss
    assert (last[0], last[7168]) == (30.0, pytest.approx(7.5, abs=1e-2))
    heads = found.by_key["heads", "bf16", "model.layers.31.self_attn.o_proj"].loss
    assert heads == pytest.approx(30.0 * (1 - np.arange(9) / 8) ** 2, abs=1e-2)
    assert found.by_key["skip", "bf16", "model.layers.31.mlp.down_proj"].loss.tolist() == [30.0, 0.0]
    assert ("skip", "bf16", "model.layers.0.self_attn.o_proj") not in found.by_key


def test_curves_never_rise_and_end_at_nothing() -> None:
    sites = family_of(LARGE).sites(LARGE)
    for curve in CurveLibrary.load().curves_of(sites).by_key.values():
        assert (np.diff(curve.loss) <= 0).all()
        assert curve.loss[-1] == 0


def test_weights_of_other_names_are_refused() -> None:
    shapes = SHAPES["llama-3-8b"]
    sites = family_of(shapes).sites(shapes)
    few = CurveLibrary("small", "kfac", TEXT, {"low_rank/other": np.zeros((1, 257))}, {"low_rank/other": 1.0})
    with pytest.raises(ModelError) as caught:
        few.curves_of(sites)
    assert str(caught.value) == (
        "no loss curve is known for q_proj; expected weights called as those of small: other. "
        "Give weights instead of shapes."
    )
