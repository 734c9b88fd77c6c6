"""Loss curves for shapes without weights."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from gac.core.errors import ModelError
from gac.forms import FORMS
from gac.forms.loss_curves import LossCurve
from gac.models.families import family_of
from gac.models.shapes import SHAPES, Shapes
from gac.models.sites import Site
from gac.plan.evidence import Calibration
from gac_extensions.lab.shapes.curve_library import LATENTS, CurveLibrary

LOW_RANK = FORMS.get("low_rank")
SMALL, LARGE = SHAPES["smollm2"], SHAPES["llama-3-8b"]
TEXT = Calibration("text", 2, 8, "digest", 3.0)


def library() -> CurveLibrary:
    """Every curve falls from the layer's number plus one to 0, as the square of what is cut off."""
    rows = np.stack([falling(layer, 256).loss for layer in range(30)])
    weights = {weight.name.rpartition(".")[2]: weight for site in sites_of(SMALL) for weight in site.weights}
    fractions = {
        f"low_rank/{name}": LOW_RANK.params(weight, LOW_RANK.full(weight)) / weight.params
        for name, weight in weights.items()
    }
    fractions |= dict.fromkeys(("narrow/down_proj", "heads/o_proj", "skip/o_proj", "skip/down_proj"), 1.0)
    return CurveLibrary("small", "kfac", TEXT, dict.fromkeys(fractions, rows), fractions)


def sites_of(shapes: Shapes) -> Sequence[Site]:
    return family_of(shapes).sites(shapes)


def falling(layer: int, full: int) -> LossCurve:
    return LossCurve((layer + 1) * (1 - np.arange(full + 1) / full) ** 2)


def test_curves_are_those_at_the_same_fraction_and_depth() -> None:
    curves = library().curves_of(sites_of(SMALL))
    for layer, weight in ((site.layer, weight) for site in sites_of(SMALL) for weight in site.weights):
        full = min(weight.out_features, weight.in_features)
        assert np.allclose(curves.of(LOW_RANK, weight).loss, falling(layer, full).loss, atol=1e-3)
    sites = sites_of(LARGE)
    found = library().curves_of(sites)
    first = found.by_key["low_rank", "bf16", "model.layers.0.self_attn.q_proj"].loss
    assert first[2048] == pytest.approx(0.25, abs=1e-3)
    last = found.by_key["narrow", "bf16", "model.layers.31.mlp.down_proj"].loss
    assert (last[0], last[7168]) == (30.0, pytest.approx(7.5, abs=1e-2))
    heads = found.by_key["heads", "bf16", "model.layers.31.self_attn.o_proj"].loss
    assert heads == pytest.approx(30.0 * (1 - np.arange(9) / 8) ** 2, abs=1e-2)
    assert found.by_key["skip", "bf16", "model.layers.31.mlp.down_proj"].loss.tolist() == [30.0, 0.0]
    assert ("skip", "bf16", "model.layers.0.self_attn.o_proj") not in found.by_key
    for (form, *_), curve in CurveLibrary.load().curves_of(sites).by_key.items():
        assert (np.diff(curve.loss) <= 0).all()
        assert (curve.loss[-1] == 0) == (form != "latent:1:int8")


def test_latents_lose_as_much_at_the_same_share_of_their_full_rank() -> None:
    known = library()
    curves = {f"{form}/{name}": known.curves["low_rank/k_proj"] for form in LATENTS for name in ("k_proj", "v_proj")}
    sites = sites_of(LARGE)
    found = replace(known, curves={**known.curves, **curves}).curves_of(sites)
    for form in LATENTS:
        curve = found.by_key[form, "bf16", "model.layers.31.self_attn.k_proj"].loss
        assert (len(curve), curve[64]) == (129, pytest.approx(7.5, abs=1e-2))
    assert {one for one, *_ in known.curves_of(sites).by_key}.isdisjoint(LATENTS)


def priced() -> CurveLibrary:
    """Rounding costs a hundredth of the layer's number plus one, and of a pair as much for the whole of its rank."""
    plain = library()
    dense = (np.arange(30)[:, None] + 1) / 100
    names = {key.rpartition("/")[2] for key in plain.curves}
    prices = {f"w4a16/{name}": dense for name in names}
    prices |= {f"w4a16/low_rank/{name}": dense * np.linspace(0, 1, 17) for name in names}
    return replace(plain, prices=prices)


def test_rounding_costs_what_it_costs_at_the_same_depth() -> None:
    sites = sites_of(LARGE)
    found = priced().curves_of(sites, ["bf16", "w4a16"]).by_key
    exact = library().curves_of(sites).by_key
    for layer, price in ((0, 0.01), (31, 0.3)):
        name = f"model.layers.{layer}.self_attn.q_proj"
        assert found["dense", "w4a16", name].loss == pytest.approx(price)
        pair = found["low_rank", "w4a16", name].loss - exact["low_rank", "bf16", name].loss
        assert pair == pytest.approx(price * np.arange(4097) / 4096)
        whole = found["narrow", "w4a16", f"model.layers.{layer}.mlp.down_proj"].loss
        assert whole[-1] == pytest.approx(3 * price)  # gate and up are narrower too
    assert found["low_rank", "bf16", name].loss.tolist() == exact["low_rank", "bf16", name].loss.tolist()


def test_what_is_not_known_is_refused() -> None:
    few = CurveLibrary("small", "kfac", TEXT, {"low_rank/other": np.zeros((1, 257))}, {"low_rank/other": 1.0})
    with pytest.raises(ModelError, match=r"no loss curve is known for q_proj; expected .* those of small: other"):
        few.curves_of(sites_of(LARGE))
    with pytest.raises(ModelError, match=r"no price of rounding q_proj to w3a16 is known; expected .* w4a16"):
        priced().curves_of(sites_of(LARGE), ["w3a16"])


def test_the_shipped_library_has_a_price_for_each_scheme_that_rounds() -> None:
    sites = sites_of(SMALL)
    few, many = (CurveLibrary.load().curves_of(sites, [name]) for name in ("w2a16", "w8a16"))
    for weight in (weight for site in sites for weight in site.weights):
        less = many.by_key["dense", "w8a16", weight.name].loss[0]
        assert 0 < less < few.by_key["dense", "w2a16", weight.name].loss[0]
