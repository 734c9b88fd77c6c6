"""8 bits on both sides, and low-rank pairs: what is stored, which dims there are, what rounding of both costs."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import gac
from gac.allocation.candidate_set import CandidateSet
from gac.allocation.candidates import candidates
from gac.allocation.feasibility import check_reachable
from gac.allocation.latencies import Timing
from gac.compression.rounding import store
from gac.core.errors import PlanError
from gac.forms import form_named, variants_of
from gac.forms.artifacts import LayerArtifacts
from gac.forms.curvature.methods import Kfac
from gac.forms.curvature.metric import FACTOR, Moments
from gac.forms.decomposition import with_rotated_latents
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.forms.low_rank.torch import largest_squares
from gac.forms.tensors import Statistics, tensors_of
from gac.measurement.calibration import CalibrationRun, stream_moments
from gac.measurement.curves import rounding_loss
from gac.models.families import family_of
from gac.models.linears import linear_at
from gac.models.sites import Site, Weight
from gac.plan.plan import Plan
from gac.runtime.modules import LowRankLinear, ValueLinear
from gac.runtime.storage.base import Storage
from gac.runtime.storage.eight_bits import READERS, Floats8, Floats8Blocks, Integers8
from gac.runtime.storage.modules import plain_state, stored_modules
from gac.schemes import SCHEMES, Scheme, scheme_named
from gac.schemes.eight_bits.float8 import FLOAT8, Float8Levels
from gac.schemes.feedback.order import Inputs
from gac.schemes.matrices import quantise_matrix
from gac.testing import check_bits
from tests.changed import edited
from tests.compression.applying import logits
from tests.models.small import small_config
from tests.small_pipeline import Small

NAMES = ("fp8", "w8a8", "fp8_block")
BOTH = pytest.mark.parametrize("name", NAMES)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def errors_of(name: str, x: Tensor) -> Tensor:
    numbers, scale = READERS[scheme_named(name).input_quantiser or ""](x)
    return (numbers * scale - x).double()


class Plain(Kfac):
    """Moments as they are: all tokens count alike, nothing is damped."""

    name, power = "plain", 0.0

    def pooled(self, halves: Any) -> Tensor:
        return halves.mean()

    def inputs(self, moments: Moments) -> Tensor:
        return moments.inputs.double()

    def gradients(self, moments: Moments) -> Tensor:
        return moments.gradients.double()


def pair_statistics(outs: int, ins: int) -> tuple[Statistics, Weight, Tensor]:
    """Of one random weight whose inputs are normal numbers along a few strong directions; the inputs too."""
    x = normal(4096, ins) * torch.logspace(0, -1.5, ins) @ torch.linalg.qr(normal(ins, ins, seed=1))[0]
    root = normal(outs, outs, seed=2) * torch.logspace(0, -1, outs)
    model, weight = nn.Module(), Weight("w", outs, ins)
    model.w = nn.Linear(ins, outs, bias=False)
    model.w.weight.data.copy_(normal(outs, ins, seed=3))
    noise = {scheme_named(name).input_quantiser or "": errors_of(name, x).square().mean(0).float() for name in NAMES}
    moments = Moments(x.T @ x / len(x), root @ root.T, x.abs().mean(0), noise)
    statistics = Statistics(model, lambda _: moments, Plain(), LayerArtifacts({}))
    (fit,) = tensors_of(form_named("low_rank")).measure(statistics, [weight])
    artifacts = LayerArtifacts({f"low_rank.{tensor}/w": value for tensor, value in fit.tensors.items()})
    return replace(statistics, artifacts=artifacts), weight, x


def quantising(reader: str) -> Integers8 | Floats8:
    return {"int8": Integers8(), "float8": Floats8(), "float8_groups": Floats8Blocks()}[reader]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats_are_found_again(dtype: torch.dtype) -> None:
    """Those of any scale with 4 bits, whatever power of two it has."""
    numbers = normal(16, 64).to(FLOAT8).float()
    for eighths in range(8, 16):
        matrix = (numbers * eighths * 2.0**-9).to(dtype)
        assert torch.equal(scheme_named("fp8").quantised(matrix), matrix)


def test_floats_are_the_nearest_in_their_scale() -> None:
    matrix = normal(8, 96) * torch.logspace(0, -3, 96)
    grid = quantise_matrix(matrix, None, Float8Levels(), None)
    every = torch.arange(256, dtype=torch.uint8).view(FLOAT8).double()
    every = every[every.isfinite()]
    distance = (matrix[..., None] / grid.scale.double()[..., None] - every).abs()
    nearest = distance.amin(-1) * grid.scale.double()
    assert torch.allclose((grid.values().double() - matrix).abs(), nearest)


@pytest.mark.parametrize("rows_compensate", [False, True])
def test_128_rows_and_columns_share_a_scale(rows_compensate: bool) -> None:
    """With feedback too, of which the result is no worse; the last blocks have fewer rows and columns."""
    scheme, inputs = scheme_named("fp8_block"), normal(400, 200).double()
    inputs = inputs.T @ inputs / 400 + 10
    matrix = normal(300, 200, seed=1) * torch.logspace(0, -3, 300)[:, None]
    gradients = (torch.eye(300) + 1).double() if rows_compensate else None
    stored, nearest = scheme.stored(matrix, Inputs(inputs), gradients), scheme.stored(matrix)
    assert torch.equal(stored["weight_scale"], nearest["weight_scale"])
    assert stored["weight_scale"].shape == (3, 2)
    assert sum(one.nbytes for one in stored.values()) == scheme.bytes(300, 200) == 300 * 200 + 3 * 2 * 4
    units = matrix / nearest["weight_scale"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200]
    assert torch.equal(nearest["weight"].float(), units.to(FLOAT8).float())
    assert float(nearest["weight"].float().abs().amax()) > 224  # else half of the range is not used
    errors = [(scheme.quantised(matrix, *seen) - matrix).double() for seen in ((Inputs(inputs), gradients), ())]
    weigh = torch.eye(300).double() if gradients is None else gradients
    worse, before = (float(((weigh @ error @ inputs) * error).sum()) for error in errors)
    assert worse < 0.6 * before


def test_parts_of_blocks_are_those_of_the_matrix() -> None:
    storage, matrix = Floats8Blocks(), normal(300, 400)
    stored = scheme_named("fp8_block").stored(matrix)
    values = storage.values(stored, 300, 400, torch.float32)
    assert storage.step == 128
    for start, stop in ((0, 128), (128, 300), (256, 260)):
        part = storage.slice_rows(stored, slice(start, stop))
        assert torch.equal(storage.values(part, stop - start, 400, torch.float32), values[start:stop])
    assert not storage.can_slice_columns(slice(64, 400), 400)
    assert not storage.can_slice_columns(slice(0, 64), 400)
    for start, stop in ((0, 128), (128, 400)):
        assert storage.can_slice_columns(slice(start, stop), 400)
        part = storage.slice_columns(stored, slice(start, stop), 400)
        assert torch.equal(storage.values(part, 300, stop - start, torch.float32), values[:, start:stop])


def test_an_outlier_costs_its_group_of_columns_alone() -> None:
    x = normal(4, 300) * 2**-9
    x[:, 5] = 448
    numbers, scale = READERS["float8_groups"](x)
    assert torch.equal(scale, torch.ones(4, 1))
    for columns in (slice(0, 128), slice(128, 256), slice(256, 300)):
        part, each = READERS["float8"](x[:, columns])
        assert torch.equal(numbers[:, columns], part * each)
    by_token, each = READERS["float8"](x)
    errors = [(read - x)[:, 128:].norm() for read in (numbers, by_token * each)]
    assert errors[0] < 0.2 * errors[1]


def test_more_bits_lose_no_more() -> None:
    check_bits(*SCHEMES, *map(scheme_named, ("w4a16:32", "w2a16:32")))
    worse = copy.copy(scheme_named("bf16"))
    worse.quantised = lambda matrix, *known: torch.zeros_like(matrix)  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="bf16 loses more"):
        check_bits(scheme_named("w8a16"), worse)


def falling(sites: tuple[Site, ...], forms: tuple[str, ...], schemes: tuple[str, ...]) -> LossCurves:
    """Curves of which every dim loses less than the one before."""
    return LossCurves(
        {
            (form.name, scheme, weight.name): LossCurve(np.linspace(1, 0, form.full(weight) + 1))
            for site in sites
            for weight in site.weights
            for form in variants_of(map(form_named, ("dense", *forms)), weight)
            for scheme in schemes
            if form.applies_to(weight)
        }
    )


def candidates_of(site: Site, forms: tuple[str, ...], *schemes: str) -> CandidateSet:
    space = gac.plan.recipe.Space(forms=forms, schemes=schemes, align=False)
    return candidates(site, falling((site,), forms, schemes), space, Timing(None, ()), ("bytes",))


def alone(out: int, ins: int) -> Site:
    return Site("w", 0, "w", (Weight("w", out, ins),))


def mlp(neurons: int) -> Site:
    gate, up = (Weight(name, neurons, 32, neurons="out", input_group="mlp") for name in ("gate", "up"))
    return Site("mlp", 0, "mlp", (gate, up, Weight("down", 32, neurons, neurons="in")))


def test_ranks_and_widths_are_multiples_of_16_in_8_bits() -> None:
    ranks = candidates_of(alone(160, 128), ("low_rank",), "fp8", "w8a16")
    for scheme, expected in (("fp8", [16, 32, 48, 64]), ("w8a16", list(range(1, 72)))):
        assert ranks.dims[(ranks.schemes == scheme) & (ranks.forms == "low_rank")].tolist() == expected
    widths = candidates_of(mlp(96), ("narrow", "narrow_pair"), "w8a8")
    assert len(widths) > 1
    assert not (widths.dims % 16).any()


def test_a_weight_that_cannot_stay_dense_in_8_bits_may_be_narrower() -> None:
    narrow = candidates_of(mlp(100), ("narrow",), "fp8")
    assert set(narrow.forms.flat) == {"narrow"}
    assert narrow.dims.max() == 96
    both = candidates_of(mlp(100), ("narrow",), "fp8", "bf16")
    assert set(both.schemes[both.forms == "dense"]) == {"bf16"}


def test_where_no_dim_is_left_the_error_says_what_can_be_had_before_anything_is_measured() -> None:
    message = r"no allowed dim of dense, low_rank for w \(100 x 64\) in schemes fp8, w8a8; .* Add a scheme that"
    with pytest.raises(PlanError, match=message):
        candidates_of(alone(100, 64), ("low_rank",), "fp8", "w8a8")
    assert len(candidates_of(alone(100, 64), ("low_rank",), "fp8", "w8a8", "w4a16"))
    config = small_config("llama", hidden_size=72)
    recipe = gac.Recipe.of(0.9, schemes=("fp8",), profile="nvidia-h100-80gb-hbm3", align=False)
    with pytest.raises(PlanError, match=r"q_proj \(128 x 72\) in schemes fp8"):
        check_reachable(family_of(config).sites(config), recipe, gac.Profile.load("nvidia-h100-80gb-hbm3"))


def reading_alone(name: str) -> Scheme:
    """The scheme, but its weights are not rounded."""
    scheme = copy.copy(scheme_named(name))
    scheme.quantised = lambda matrix, *known: matrix  # type: ignore[method-assign]
    return scheme


@BOTH
def test_the_price_is_the_mean_squared_error_in_the_metric(name: str, tiny_model: LlamaForCausalLM) -> None:
    """Of every weight of a layer; errors of features follow each other little, and gradients not at all."""
    windows = torch.randint(0, 256, (8, 128), generator=torch.Generator().manual_seed(3))
    sites = family_of(tiny_model.config).sites(tiny_model.config)
    run = CalibrationRun(tiny_model, windows, Plain(), progress=False, readers=tuple(READERS))
    layer, moments = next(iter(stream_moments(run, sites)))
    statistics = Statistics(tiny_model, moments.of, run.method, LayerArtifacts({}))
    for weight in (weight for site in sites if site.layer == layer for weight in site.weights):
        seen: list[Tensor] = []
        module = tiny_model.get_submodule(weight.name)
        hook = module.register_forward_hook(lambda _m, given, _o, seen=seen: seen.append(given[0].flatten(0, -2)))
        with torch.no_grad():
            tiny_model(windows)
        hook.remove()
        changes = errors_of(name, seen[0].float()) @ linear_at(tiny_model, weight.name).weight.detach().double().T
        measured = FACTOR * float(((changes @ statistics.metric(weight).gradients) * changes).sum(1).mean())
        inputs = Inputs(statistics.metric(weight).inputs)
        price = rounding_loss(statistics, weight, reading_alone(name), inputs)
        assert price == pytest.approx(measured, rel=0.05), weight.name


@BOTH
@pytest.mark.parametrize("rank", [16, 96])
def test_the_price_of_a_pair_counts_its_latents(name: str, rank: int) -> None:
    (statistics, weight, x), form = pair_statistics(96, 128), form_named("low_rank")
    inputs = Inputs(statistics.metric(weight).inputs)
    price = tensors_of(form).rounding(statistics, weight, reading_alone(name), inputs)
    second, first = (statistics.artifacts.of(form, one, weight) for one in ("second", "first"))
    second, first = with_rotated_latents(second[:, :rank], first[:rank])
    changes = [errors_of(name, x) @ first.T @ second.T, errors_of(name, (x.double() @ first.T).float()) @ second.T]
    gradients = statistics.metric(weight).gradients
    measured = [FACTOR * float(((change @ gradients) * change).sum(1).mean()) for change in changes]
    assert float(price[rank]) == pytest.approx(sum(measured), rel=0.08)
    assert measured[1] > 0.02 * sum(measured)  # else nothing is said of the latents


def test_the_largest_of_normal_numbers() -> None:
    z = normal(20000, 300).double()
    assert torch.allclose(largest_squares(torch.arange(1, 301)), z.square().cummax(1).values.mean(0), rtol=0.03)


def test_inputs_are_read_token_by_token() -> None:
    x = normal(5, 64) * torch.tensor([1.0, 1e-6, 1e4, 0.0, 1.0])[:, None]
    for reader, step in (("int8", 1 / 254), ("float8", 1 / 28)):
        numbers, scale = READERS[reader](x)
        assert scale.shape == (5, 1)
        assert (numbers.abs() <= 1).all()
        largest = x.abs().amax(1, keepdim=True)
        assert ((numbers * scale - x).abs() <= largest * step * 1.001).all()
        assert torch.allclose((numbers * scale).abs().amax(1, keepdim=True), largest)
    assert (READERS["int8"](x)[0] * 128).round().min() >= -127
    x = torch.cat([normal(64, 512) * torch.logspace(0, -9, 512), normal(64, 512).bfloat16()])  # as PyTorch converts
    numbers, scale = READERS["float8"](x)
    assert torch.equal(numbers * 512, (x / (scale / 512)).to(FLOAT8).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_hold_numbers_and_sums(dtype: torch.dtype) -> None:
    x, weight = 100 * normal(3, 4096).abs().to(dtype), torch.full((16, 4096), 0.05, dtype=dtype)
    for reader, read in READERS.items():
        numbers, scale = read(x)
        alike = read(x.float())[0]
        assert torch.equal(numbers, alike.to(dtype))
        assert reader == "float8_groups" or torch.equal(numbers.float(), alike)  # which has scales in its numbers
        exact = (numbers.double() * scale) @ weight.double().T
        assert torch.allclose(quantising(reader).linear(x, weight, None).double(), exact, rtol=1e-2)


@BOTH
def test_modules_round_what_they_multiply(name: str) -> None:
    scheme = scheme_named(name)
    pair = LowRankLinear(64, 16, 48, bias=True)
    values = ValueLinear(64, 2, 16, bias=False)
    for number, parameter in enumerate([*pair.parameters(), *values.parameters()]):
        parameter.data.copy_(normal(*parameter.shape, seed=number))
    x, reader = normal(2, 5, 64), scheme.input_quantiser or ""
    factors = with_rotated_latents(pair.second.weight, pair.first.weight)
    second, first, alone = (scheme.quantised(one).float() for one in (*factors, values.weight))
    bias = pair.second.bias
    held, held_values = store(scheme, pair), store(scheme, values)
    latents = quantising(reader).linear(x, first, None)
    assert torch.equal(held(x), quantising(reader).linear(latents, second, bias))
    assert torch.equal(held_values(x).view(2, 5, -1, 16).flatten(2), quantising(reader).linear(x, alone, None))
    assert torch.equal(copy.deepcopy(held)(x), held(x))


@pytest.mark.parametrize(("name", "refit"), [("fp8", "residual"), ("w8a8", "none"), ("fp8_block", "residual")])
def test_a_compressed_model_rounds_its_inputs(name: str, refit: str, small: Small, monkeypatch: Any) -> None:
    plan = small.allocate(0.9, schemes=(name,), refit=refit, fuse=True, align=8)
    assert {choice.scheme for choice in plan.weights} == {name}
    for choice in plan.weights:
        gemms = form_named(choice.form).latency.gemms(choice.weight, choice.dim, 1)
        assert all(map(scheme_named(name).supports, gemms))
    model = small.compress(plan, model=copy.deepcopy(small.model))
    before, stored = logits(model), stored_modules(model)
    assert len(stored) >= len(plan.weights)
    with monkeypatch.context() as patch:
        for storage in {type(module.storage) for module in stored.values()}:
            patch.setattr(storage, "linear", Storage.linear)
        assert not torch.equal(logits(model), before)


def test_a_plan_with_a_rank_that_its_scheme_cannot_have_is_refused(small: Small, tmp_path: Path) -> None:
    plan = small.allocate(0.6, schemes=("bf16",), forms=("low_rank",), align=8)
    plan.save(tmp_path / "plan.json")
    with edited(tmp_path / "plan.json") as text:
        weights = (weight for site in text["sites"] for weight in site["weights"])
        next(weight for weight in weights if weight["form"] == "low_rank" and weight["dim"] % 16)["scheme"] = "fp8"
    with pytest.raises(PlanError, match=r"low_rank [0-9]+ in fp8; expected rows and columns that are multiples of 16"):
        Plan.load(tmp_path / "plan.json")


def lost(error: Tensor, inputs: Tensor) -> float:
    return float(((error.double() @ inputs) * error.double()).sum())


def test_rotated_latents_give_the_product_and_make_up_for_one_another() -> None:
    """In order of their variances feedback leaves the arithmetic mean of them; rotated, the geometric one."""
    second, first = normal(30, 24), normal(24, 40, seed=1)
    other = with_rotated_latents(second, first)
    assert torch.allclose(other[0] @ other[1], second.double() @ first.double())
    assert not torch.allclose(other[1], first.double())
    matrix, latents = normal(48, 64).double(), torch.logspace(0, -4, 64, dtype=torch.float64).diag()
    other, basis = with_rotated_latents(matrix, torch.eye(64))
    seen, scheme = basis @ latents @ basis.T, scheme_named("w4a16:32")
    plain = lost(scheme.quantised(matrix, Inputs(latents)) - matrix, latents)
    assert lost(scheme.quantised(other, Inputs(seen)) - other, seen) < 0.4 * plain


def test_the_second_factor_is_solved_for_the_first_as_it_was_rounded() -> None:
    scheme, module, x = scheme_named("w2a16:8"), LowRankLinear(40, 12, 30, bias=False), normal(400, 40, seed=4)
    for seed, own in enumerate(module.parameters()):
        own.data = normal(*own.shape, seed=seed)
    inputs = (x.T @ x / len(x)).double()
    dense = (module.second.weight @ module.first.weight).detach()
    second, first = with_rotated_latents(module.second.weight.detach(), module.first.weight.detach())
    state = plain_state(store(scheme, module, inputs), torch.float32)
    first = scheme.quantised(first, Inputs(inputs)).float()
    assert torch.equal(state["first.weight"], first)
    seen = first.double() @ inputs @ first.double().T
    as_it_was = scheme.quantised(second, Inputs(seen)).float()
    solved, not_solved = (lost(dense - one @ first, inputs) for one in (state["second.weight"], as_it_was))
    assert solved < not_solved


@pytest.mark.usefixtures("usual_blocks")
@pytest.mark.parametrize("name", ["w8a16", "w4a16:32", "w3a16:32"])
@pytest.mark.parametrize(("outs", "ins"), [(96, 128), (160, 96)])
def test_one_rounding_prices_every_rank(outs: int, ins: int, name: str) -> None:
    statistics, weight, _ = pair_statistics(outs, ins)
    form, metric, scheme = form_named("low_rank"), statistics.metric(weight), scheme_named(name)
    price = tensors_of(form).rounding(statistics, weight, scheme, Inputs(metric.inputs))
    second, first = (statistics.artifacts.of(form, one, weight) for one in ("second", "first"))
    for rank in (16, 24, 48, 56):
        module = LowRankLinear(ins, rank, outs, bias=False)
        module.second.weight.data, module.first.weight.data = second[:, :rank].clone(), first[:rank].clone()
        state = plain_state(store(scheme, module, metric.inputs), torch.float64)
        error = state["second.weight"] @ state["first.weight"] - second[:, :rank].double() @ first[:rank].double()
        measured = FACTOR * float(((metric.gradients @ error @ metric.inputs) * error).sum())
        assert 0.6 < float(price[rank]) / measured < 1.3
