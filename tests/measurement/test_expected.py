"""What is expected of measured losses."""

from dataclasses import replace

import numpy as np
import pytest

from gac.forms.curvature.registry import METHODS
from gac.forms.loss_curves import LossCurve, LossCurves, WholeModelLoss
from gac.measurement.expected import BEHIND_NORMS, BESIDE, PLAIN, WHOLE, expected_curves, expected_error, expected_share
from gac.models.families import Family, family_of
from gac.plan.evidence import Calibration
from gac.plan.recipe import Recipe
from tests.models.small import small_config

LLAMA, GEMMA = (family_of(small_config(name)) for name in ("llama", "gemma3_text"))
CURVES = LossCurves(
    {
        ("low_rank", "bf16", "w"): LossCurve(np.array([3.0, 1.0, 0.0])),
        ("low_rank", "w4a16", "w"): LossCurve(np.array([3.0, 1.5, 1.0])),
        ("dense", "w4a16", "w"): LossCurve(np.array([0.5, 0.5])),
        ("skip", "bf16", "o"): LossCurve(np.array([2.0, 0.0])),
        ("skip", "bf16", "d"): LossCurve(np.array([4.0, 0.0])),
    },
    pairs={frozenset({("skip", "o"), ("skip", "d")}): 0.5},
    on_text={("skip", "o"): 1.5},
)


def recipe(**asked: object) -> Recipe:
    return Recipe.of(0.8, **({"forms": ("low_rank", "skip"), "refit": "residual"} | asked))


@pytest.mark.parametrize("family", [LLAMA, GEMMA], ids=["llama", "gemma3_text"])
def test_each_kind_of_loss_has_its_share(family: Family) -> None:
    found = expected_curves(CURVES, recipe(), METHODS.get("kfac"), family)
    assert found.by_key["low_rank", "bf16", "w"].loss.tolist() == pytest.approx(
        [3 * own(family, "predicted"), own(family, "predicted"), 0]
    )
    run, left = own(family, "run"), own(family, "predicted") / own(family, "predicted", "none")
    assert found.by_key["skip", "bf16", "o"].loss.tolist() == pytest.approx([2 * run, 0])
    both = [("skip", "o", 0), ("skip", "d", 0)]
    assert found.beyond_sum(both[:1]) == pytest.approx(1.5 * left - 2 * run)
    assert found.beyond_sum(both) == pytest.approx(1.5 * left - 2 * run + 0.5 * run)
    assert found.beyond_sum([("skip", "o", 1), ("skip", "d", 0)]) == 0


@pytest.mark.parametrize("family", [LLAMA, GEMMA], ids=["llama", "gemma3_text"])
def test_of_a_price_that_runs_have_corrected_it_is_what_a_refit_leaves(family: Family) -> None:
    priced = LossCurves({("latent", "bf16", "k"): LossCurve(np.array([3.0, 1.0, 0.0]))})
    corrected = replace(priced, wholes={"latent": WholeModelLoss("latent", (1.0,), (1.2,))})
    for refit in ("none", "residual"):
        for curves, left in ((corrected, WHOLE[refit]), (priced, own(family, "predicted", refit))):
            found = expected_curves(curves, recipe(forms=("latent",), refit=refit), METHODS.get("kfac"), family)
            assert found.by_key["latent", "bf16", "k"].loss.tolist() == pytest.approx([3 * left, left, 0])


def own(family: Family, kind: str, refit: str = "residual") -> float:
    shares = PLAIN if family is LLAMA else BEHIND_NORMS
    return float(getattr(shares, kind)[refit])


def test_what_is_expected_beside_rounding_and_of_methods_that_nobody_compared() -> None:
    found = expected_curves(CURVES, recipe(schemes=("bf16", "w4a16")), METHODS.get("kfac"), LLAMA).by_key
    assert found["low_rank", "bf16", "w"].loss.tolist() == pytest.approx([2.58 + BESIDE, 0.86 + BESIDE, 0])
    rounded = [2.58, 0.86 + 0.86 * 0.7 * 0.5, 0.86 * 0.7]
    assert found["low_rank", "w4a16", "w"].loss.tolist() == pytest.approx([*np.add(rounded[:2], BESIDE), rounded[2]])
    assert found["dense", "w4a16", "w"].loss.tolist() == pytest.approx([0.86 * 0.7 * 0.5] * 2)
    found = expected_curves(CURVES, recipe(method="svd-llm", refit="none"), METHODS.get("svd-llm"), GEMMA)
    assert found.by_key["low_rank", "bf16", "w"].loss.tolist() == [3, 1, 0]
    assert found.by_key["skip", "bf16", "o"].loss.tolist() == [2, 0]


def test_what_is_expected_of_a_prediction_depends_on_the_method_and_on_norms() -> None:
    ours, peers, plain = METHODS.get("kfac"), METHODS.get("svd-llm"), LLAMA
    assert expected_share("residual", peers, plain) == 1.0
    assert expected_share("residual", ours, GEMMA) == BEHIND_NORMS.predicted["residual"]
    assert expected_share(None, ours, plain) == PLAIN.predicted["none"]
    sizes = [(1, 2**15), (4, 1023), (4, 1024), (31, 1024), (32, 1024)]
    texts = [Calibration("wiki-sample", *size, "0" * 64, 2.0) for size in sizes]
    assert [expected_error(ours, text) for text in texts] == [None, None, 0.25, 0.25, 0.15]
    assert expected_error(peers, texts[-1]) is None
