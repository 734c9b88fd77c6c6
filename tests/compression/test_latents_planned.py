"""Latents of few bits from the curve to the checkpoint: their price, their basis, and what plans make of them."""

from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from gac.core.errors import BudgetError, GacError
from gac.forms import form_named
from gac.forms.curvature.metric import Metric
from gac.forms.decomposition import decompose, with_rotated_latents
from gac.forms.latent.torch import balance_of, moments_of_latents, rounding_cost
from gac.measurement.store import read_tensors
from gac.runtime.latents.attention import second_factor
from gac.runtime.latents.quantise import rounded_latents
from tests.small_pipeline import Small

FORMS = ("latent:1", "latent:1:int8", "latent:1:int4")
ROWS, IN = 32, 48


@pytest.fixture(scope="module")
def case() -> tuple[Tensor, Metric, Tensor]:
    """A weight, what errors of it cost, and tokens that it reads; features differ much, in and out."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tokens = normal(4096, IN) * torch.logspace(0, -2, IN) @ normal(IN, IN)
    gradients = normal(512, ROWS) * torch.logspace(0, -1, ROWS) @ normal(ROWS, ROWS)
    return normal(ROWS, IN), Metric(tokens.T @ tokens / 4096, gradients.T @ gradients / 512), tokens


def pair_of(case: tuple[Tensor, Metric, Tensor], rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Factors of the rank, and the variances and gains of their latents."""
    weight, metric, _ = case
    second, first = decompose(weight, metric).factors(ROWS)
    variances, gains = moments_of_latents(second[None], first, metric)
    return second[:, :rank], first[:rank], variances, gains


def cost_of_rounding(case: tuple[Tensor, Metric, Tensor], second: Tensor, first: Tensor, bits: int) -> float:
    """What it costs of the tokens, in the metric."""
    _, metric, tokens = case
    latents = tokens @ first.T
    errors = (rounded_latents(latents, 1, bits) - latents) @ second.T
    return float((errors @ metric.gradients * errors).sum() / len(tokens))


@pytest.mark.parametrize(("bits", "rank"), [(8, 8), (4, 32)])
def test_the_price_is_what_rounding_costs(case: tuple[Tensor, Metric, Tensor], bits: int, rank: int) -> None:
    second, first, variances, gains = pair_of(case, rank)
    by = balance_of(variances, gains)[0, :rank]
    turned = with_rotated_latents(second / by, first * by[:, None])
    price = float(rounding_cost(variances, gains, bits)[rank - 1])
    assert price == pytest.approx(cost_of_rounding(case, *turned, bits), rel=0.25)


@pytest.mark.parametrize("bits", [8, 4])
def test_balanced_and_rotated_latents_lose_less(case: tuple[Tensor, Metric, Tensor], bits: int) -> None:
    second, first, variances, gains = pair_of(case, ROWS)
    by = balance_of(variances, gains)[0]
    plain = cost_of_rounding(case, second, first, bits)
    rotated = cost_of_rounding(case, *with_rotated_latents(second, first), bits)
    both = cost_of_rounding(case, *with_rotated_latents(second / by, first * by[:, None]), bits)
    assert both < rotated < 0.5 * plain
    variances[:, -1] = 0  # never seen
    assert balance_of(variances, gains)[0, -1] == 1
    assert rounding_cost(variances, gains, bits).isfinite().all()


@pytest.mark.parametrize(("kv_cache", "align"), [(0.6, False), (0.25, 8)])
def test_a_tight_cache_takes_few_bits_and_is_never_over(small: Small, kv_cache: float, align: bool | int) -> None:
    plan = small.allocate(1.0, forms=FORMS, kv_cache=kv_cache, align=align, refit="none")
    used, whole = plan.kv_numbers
    assert used <= int(kv_cache * whole)
    assert used == sum(form_named(one.form).cache.numbers(one.weight, one.dim) for one in plan.weights)
    assert any(form_named(one.form).cache.bits for one in plan.weights)
    if not align:
        alone = small.allocate(1.0, forms=FORMS[:1], kv_cache=kv_cache, align=False, refit="none")
        assert plan.prediction.loss < alone.prediction.loss


def test_what_is_saved_runs_with_the_cache_of_the_plan(small: Small, tmp_path: Path) -> None:
    plan = small.allocate(1.0, forms=FORMS, kv_cache=0.4, align=False, refit="residual")
    for model in small.there_and_back(plan, tmp_path):
        bits = {
            one.name: second_factor(model.get_submodule(one.name)).bits for one in plan.weights if one.form in FORMS
        }
        assert bits == {one.name: form_named(one.form).cache.bits for one in plan.weights if one.form in FORMS}
        model.bfloat16()
        with torch.no_grad():
            layers = model(torch.arange(10)[None], use_cache=True).past_key_values.layers
        kept = [held[0, :, 0] for one in layers for held in (one.keys, one.values)]
        assert sum(one.numel() * one.element_size() for one in kept) == 2 * plan.kv_numbers[0]


def test_factors_are_kept_once(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured for few bits is a price and a number for each latent."""
    monkeypatch.setenv("GAC_HOME", str(tmp_path))
    small.allocate(1.0, forms=FORMS[1:], kv_cache=0.4, align=False)
    kept = {
        name: {
            key.partition("/")[0]
            for path in tmp_path.rglob(f"factors-kfac-*{name}-[0-9]*.safetensors")
            for key in read_tensors(path, torch.device("cpu"))
            if key.startswith("latent")
        }
        for name in FORMS
    }
    assert kept == {
        "latent:1": {"latent:1.second", "latent:1.first"},
        "latent:1:int8": {"latent:1:int8.balance"},
        "latent:1:int4": {"latent:1:int4.balance"},
    }


def test_less_than_the_least_and_few_bits_by_rules_of_peers_are_refused(small: Small) -> None:
    with pytest.raises(BudgetError, match="the smallest that forms latent:1:int4 can reach"):
        small.allocate(1.0, forms=FORMS[2:], kv_cache=0.01)
    with pytest.raises(GacError, match="rule uniform with forms latent:1:int8; expected one of "):
        small.allocate(0.5, forms=FORMS[1:2], rule="uniform")


def test_a_config_with_other_bits_is_refused(small: Small, tmp_path: Path) -> None:
    plan = small.allocate(1.0, forms=FORMS[1:2], kv_cache=0.4, align=False, refit="none")
    name = next(one.name for one in plan.weights if one.form == FORMS[1])
    model = small.compress(plan)
    described = model.config.gac["modules"][name]
    assert described["module"] == "RoundedLatentLinear"
    assert MappingProxyType(described["sizes"])["bits"] == 8
    described["sizes"]["bits"] = 5
    with pytest.raises(ValueError, match="latents of 5 bits; expected one of 8, 4"):
        type(model)(model.config)
