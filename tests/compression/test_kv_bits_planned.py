"""Keys and values of few bits from the curve to the checkpoint, alone and beside latents."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gac.core.errors import BudgetError, PlanError, TextError
from gac.forms import form_named
from gac.forms.kv_bits.torch import price_of
from gac.forms.planned_sites import check_forms_fit
from gac.models.families import family_of
from gac.plan.plan import Plan
from gac.runtime.limits import BLOCK
from tests.models.small import small_config, small_model
from tests.small_pipeline import Small

FORMS = ("kv_bits", "latent:1", "latent:1:int8", "latent:1:int4", "head_dim")


def allocated(small: Small, kv_cache: float, *forms: str, refit: str = "none") -> Plan:
    text = f"{small.text}:6x256"
    return small.allocate(1.0, forms=forms, kv_cache=kv_cache, align=False, refit=refit, calibration=text)


def test_prices_fall_as_the_square_of_the_step() -> None:
    prices = price_of(9.0)
    assert np.isfinite(prices).all()
    assert (np.diff(prices) < 0).all()
    assert prices[2] == 9
    assert prices[4] == pytest.approx(9 * (3 / 15) ** 2)


@pytest.mark.parametrize("kv_cache", [0.31, 0.25])
def test_all_forms_at_once_lose_no_more_than_each_alone(small: Small, kv_cache: float) -> None:
    chosen = allocated(small, kv_cache, *FORMS)
    used, whole = chosen.kv_numbers
    assert used <= int(kv_cache * whole)
    assert used == sum(form_named(one.form).cache.numbers(one.weight, one.dim) for one in chosen.weights)
    assert chosen.certificate.status == "optimal"
    for forms in (FORMS[:1], FORMS[1:4]):
        assert chosen.prediction.loss <= allocated(small, kv_cache, *forms).prediction.loss + 1e-9


def test_what_is_saved_runs_with_the_cache_of_the_plan(small: Small, tmp_path: Path) -> None:
    plan = allocated(small, 0.4, FORMS[0], refit="residual")
    bits = {one.name: one.dim for one in plan.weights if one.changed}
    assert {one.form for one in plan.weights if one.changed} == {"kv_bits"}
    ids = torch.arange(300).remainder(200)[None]
    for model in small.there_and_back(plan, tmp_path):
        assert {name: model.get_submodule(name).cache_bits for name in bits} == bits
        given = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
        found = model.generate(ids, **given)
        layers = found.past_key_values.layers
        blocks = {layer.blocks for layer in layers}
        assert blocks == {2}
        words = sum(part[0].numel() for layer in layers for part in layer.old)
        assert words == 2 * BLOCK * plan.kv_numbers[0]
        with torch.no_grad():
            due = model(found.sequences[:, :-1], use_cache=False).logits[:, -3:].argmax(-1)
        assert torch.equal(found.sequences[:, -3:], due)


def test_what_cannot_be_is_refused(small: Small) -> None:
    with pytest.raises(TextError, match=r"form kv_bits with calibration text of at most 64 tokens .* of more than 192"):
        small.allocate(1.0, forms=FORMS[:1], kv_cache=0.4)
    with pytest.raises(BudgetError, match="the smallest that forms kv_bits can reach"):
        allocated(small, 0.1, FORMS[0])
    config = small_config("mistral", sliding_window=8)
    with pytest.raises(PlanError, match="form kv_bits for a mistral model with sliding windows in 2 layers"):
        small.allocate(1.0, small_model(config), forms=FORMS[:1], kv_cache=0.4)
    with pytest.raises(PlanError, match="form kv_bits for engine vllm; expected the forms"):
        small.allocate(1.0, forms=FORMS[:1], kv_cache=0.4, engine="vllm")
    with pytest.raises(PlanError, match="form kv_bits with tensor_parallel=2; expected one GPU"):
        small.allocate(1.0, forms=FORMS[:1], kv_cache=0.4, tensor_parallel=2)
    sites = family_of(small_config("gpt2")).sites(small_config("gpt2"))
    with pytest.raises(PlanError, match="form kv_bits, which fits no weight of a gpt2 model"):
        check_forms_fit(sites, FORMS[:1], "gpt2")
