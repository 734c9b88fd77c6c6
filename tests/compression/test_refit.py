"""Weights fitted again to the model as it is compressed so far, and logits scaled to the dense model's confidence."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gac.allocation.resolve import resolve
from gac.compression import paired_run, refit
from gac.compression.paired_run import PairedRun, ways_of
from gac.compression.refit import fitted_scale, scaled_norm
from gac.core.errors import GacError, ModelError
from gac.forms import FORMS, form_named
from gac.forms.tensors import tensors_of
from gac.measurement.calibration import decoder_layers
from gac.measurement.expected import PLAIN
from gac.models.families import Family, ResidualPath, family_of, supported
from gac.models.layer_stack import LayerStack
from gac.plan.evidence import ProfileUsed
from gac.plan.plan import Plan
from gac.plan.recipe import Recipe
from gac.profiling.table import Profile
from tests.changed import with_recipe
from tests.compression import applying
from tests.compression.applying import divergence
from tests.compression.compressed import WIDTH, MakePlan
from tests.models.small import MIXTURES, TWO_KINDS, every_layout, small_config, small_model, weights_of
from tests.small_pipeline import Small

BEHIND = (
    *(
        "exaone4",
        "falcon_h1",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "gemma4_unified_text",
        "glm4",
        "granite",
        "granite_swa",
        "granitemoehybrid",
    ),
    *("hyperclovax", "olmo2", "olmo3"),
)
"""Where a norm or a factor comes before the residual stream."""


def half_of(model: PreTrainedModel, make_plan: MakePlan, refit: str) -> Plan:
    """Every weight of layers 0 and 2 at half its rank, in a narrower MLP in layer 2, the rest dense."""
    low, inside = form_named("low_rank"), form_named(f"narrow_pair:{WIDTH}")
    layers, kept = f"{family_of(model.config).layers}.{{}}.", {}
    for weight in weights_of(model.config):
        form = inside if weight.neurons and weight.name.startswith(layers.format(2)) else low
        if weight.name.startswith((layers.format(0), layers.format(2))):
            kept[weight.name] = (form.name, form.full(weight) // 2)
    return with_recipe(make_plan(model.config, kept), refit=refit)


WINDOWS = torch.randint(0, 256, (16, 64), generator=torch.Generator().manual_seed(1))
applied = partial(applying.applied, ids=WINDOWS)
logits = partial(applying.logits, ids=WINDOWS)


def off(model: PreTrainedModel, dense: Tensor) -> float:
    return float((logits(model) - dense).norm())


def deep(model_type: str) -> PreTrainedModel:
    """Three random layers whose weights and gains are larger than usual, so that what they add counts."""
    factor = {"residual_multiplier": 0.3} if model_type in ("granite", "hyperclovax") else {}
    model = small_model(small_config(model_type, num_hidden_layers=3, **factor))
    with torch.no_grad():
        for weight in weights_of(model.config):
            model.get_submodule(weight.name).weight.mul_(4)
        for name, parameter in model.named_parameters():
            if model_type in BEHIND and "norm" in name:
                parameter.add_(torch.randn_like(parameter) / 2)
    return model


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "gemma3_text",
        "granite",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("olmo2", *TWO_KINDS)),
        "phi3",
    ],
)
def test_a_refitted_model_is_nearer(model_type: str, make_plan: MakePlan) -> None:
    model = deep(model_type)
    plan, dense = half_of(model, make_plan, "residual"), logits(model)
    plain = applied(deep(model_type), with_recipe(plan, refit="none"))
    fitted = applied(model, plan)
    assert off(fitted, dense) < 0.99 * off(plain, dense)
    if model_type in BEHIND:
        assert applying.divergence(dense, logits(fitted)) < 0.9 * applying.divergence(dense, logits(plain))


@pytest.mark.parametrize("model_type", ["gemma3_text", "granite"])
def test_a_layer_that_adds_something_else_than_its_family_says_is_refused(
    model_type: str, monkeypatch: pytest.MonkeyPatch, make_plan: MakePlan
) -> None:
    model = deep(model_type)
    monkeypatch.setattr(Family, "residual_path", lambda *_: ResidualPath())
    with pytest.raises(ModelError, match=r"adds \d+% other than its weights write"):
        applied(model, half_of(model, make_plan, "residual"))


def test_every_form_can_be_refitted_and_families_without_norm_and_factor_have_a_plain_residual_path() -> None:
    assert all("residual" in tensors_of(form).refits for form in FORMS)
    alike = [name for name in supported() if name not in MIXTURES]
    assert {name for name in alike if paths_of(small_config(name)) != {ResidualPath()}} == {*BEHIND}


def paths_of(config: Any) -> set[ResidualPath]:
    """Those of the first layer."""
    config.residual_multiplier = 0.3
    names = [weight.name for weight in weights_of(config) if weight.to_residual and ".0." in weight.name]
    assert len(names) == {"falcon_h1": 3, "nemotron_h": 1}.get(config.model_type, 2)
    return {family_of(config).residual_path(config, name) for name in names}


@pytest.mark.parametrize("model_type", ["gemma3_text", "granite", "hyperclovax", "olmo2"])
def test_a_step_gives_the_residual_stream_what_it_lacks(model_type: str) -> None:
    model = deep(model_type)
    (way,) = (way for name, way in ways_of(model, weights_of(model.config)).items() if ".0.mlp." in name)
    y = torch.randn(9, 64)
    more = 1e-3 * torch.randn(9, 64)
    got = way.added(y + way.step(y, more)) - way.added(y)
    assert (got - more).norm() < 0.5 * more.norm()  # what lies along y a norm cannot pass, nor what has small gains
    zeros = torch.zeros(9, 64)
    assert torch.isfinite(way.step(zeros, more)).all()


MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    "second_layer",
    [
        {f"self_attn.{name}": ("head_dim", 16) for name in ("v_proj", "o_proj")},
        {f"mlp.{name}": (f"narrow_pair:{WIDTH}", 24) if name == MLP[0] else ("narrow", WIDTH) for name in MLP},
        {f"mlp.{name}": (f"narrow_pair:{WIDTH}", 24) for name in MLP},
    ],
    ids=["values", "a pair inside", "pairs inside"],
)
def test_shorter_weights_are_fitted_too(second_layer: dict[str, tuple[str, int]], make_plan: MakePlan) -> None:
    changes = {f"model.layers.0.mlp.{name}": ("narrow", WIDTH) for name in MLP}
    changes |= {f"model.layers.1.{name}": change for name, change in second_layer.items()}
    plan, dense = make_plan(deep("llama").config, changes), logits(deep("llama"))
    plain, fitted = (applied(deep("llama"), with_recipe(plan, refit=refit)) for refit in ("none", "residual"))
    assert off(fitted, dense) < 0.99 * off(plain, dense)
    shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model in (plain, fitted)]
    assert shapes[0] == shapes[1]


def test_layers_below_the_first_that_changes_stay_as_they_are(tiny_config: LlamaConfig, make_plan: MakePlan) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config).eval()
    before = {name: tensor.clone() for name, tensor in model.model.layers[0].state_dict().items()}
    plan = with_recipe(make_plan(tiny_config, {"model.layers.1.self_attn.o_proj": ("low_rank", 8)}), refit="residual")
    after = applied(model, plan).model.layers[0].state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_full_ranks_lose_nothing_by_it_and_weights_train_as_before(
    tiny_model: LlamaForCausalLM, make_plan: MakePlan
) -> None:
    dense = logits(tiny_model)
    tiny_model.train().model.layers[1].self_attn.k_proj.weight.requires_grad_(False)
    full = {w.name: ("low_rank", min(w.out_features, w.in_features)) for w in weights_of(tiny_model.config)}
    model = applied(tiny_model, with_recipe(make_plan(tiny_model.config, full), refit="residual"))
    assert off(model, dense) < 1e-4
    assert all(module.training for module in model.modules())
    frozen = {name.rpartition(".self_attn.")[2] for name, each in model.named_parameters() if not each.requires_grad}
    assert frozen <= {"k_proj.first.weight", "k_proj.second.weight"}
    assert frozen


def test_the_update_is_the_least_squares_fit_of_second_factors_alone(make_plan: MakePlan) -> None:
    dense = deep("llama")
    plain, fitted = (applied(deep("llama"), half_of(dense, make_plan, refit), "svd") for refit in ("none", "update"))
    before, after = plain.state_dict(), fitted.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if not name.endswith("second.weight"))
    q_proj = "model.layers.0.self_attn.q_proj"
    x = dense.model.layers[0].input_layernorm(dense.model.embed_tokens(WINDOWS)).flatten(0, 1)
    target, first = dense.get_submodule(q_proj)(x), fitted.get_submodule(q_proj).first(x)
    least = torch.linalg.lstsq(first, target).solution
    torch.testing.assert_close(fitted.get_submodule(q_proj)(x), first @ least, atol=1e-4, rtol=1e-4)
    assert (first @ least - target).norm() < (plain.get_submodule(q_proj)(x) - target).norm()


def test_the_model_is_as_it_was_when_it_fails(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep("llama")
    before, modules = logits(model), dict(model.named_modules())

    def fails(_work: object, _module: nn.Module) -> None:
        raise RuntimeError("no more memory")

    for form in FORMS:
        monkeypatch.setattr(type(tensors_of(form)), "refits", {"residual": fails})
    with pytest.raises(RuntimeError, match="no more memory"):
        applied(model, half_of(model, make_plan, "residual"))
    assert dict(model.named_modules()) == modules
    assert torch.equal(logits(model), before)


def resolved_refit(config: Any, **options: Any) -> str | None:
    recipe = Recipe.of(1.0, align=False, latency="any", **options)
    used = ProfileUsed("a GPU", "1" * 64, "named")
    return resolve(recipe, config, Profile.load("nvidia-h200"), used).recipe.refit


def test_the_default_is_that_of_the_method_the_rule_and_the_layers() -> None:
    for asked, rule, method, model_type, resolved in (
        (None, "loss", "kfac", "granite", "residual"),
        (None, "uniform", "kfac", "llama", "none"),
        (None, "loss", "svd-llm", "llama", "none"),
        ("update", "loss", "kfac", "gemma2", "update"),
    ):
        options = {"refit": asked, "rule": rule, "method": method, "forms": ["low_rank"]}
        assert resolved_refit(small_config(model_type), **options) == resolved


def test_what_cannot_be_refitted_is_refused() -> None:
    config = small_config("opt", do_layer_norm_before=False)
    for mode, form, message in (
        ("residual", "low_rank", "of model type opt, in which the residual stream itself passes norms"),
        ("update", "narrow", "refit 'update' with forms narrow; expected low_rank, narrow_pair among the forms"),
    ):
        with pytest.raises(GacError, match=message):
            resolved_refit(config, refit=mode, forms=[form])


def test_the_prediction_knows_of_it(small: Small) -> None:
    plain, fitted = (small.allocate(0.7, refit=refit) for refit in ("none", "residual"))
    assert fitted.weights == plain.weights
    assert fitted.prediction.loss == pytest.approx(PLAIN.predicted["residual"] * plain.prediction.loss)
    assert "refitted layer by layer" in fitted.summary()
    text = fitted.measured.calibration
    size = f"{text.windows} x {text.window_tokens} tokens"
    assert f"predicted (from {size} alone, so it may be far too low)\n" in fitted.summary()


def test_16_bit_models_with_huge_hidden_states_and_weights_of_zeros_are_fitted(make_plan: MakePlan) -> None:
    model = deep("llama").to(torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(50)
        model.model.embed_tokens.weight[3, 5] = 9000.0
        model.model.layers[2].mlp.gate_proj.weight.zero_()
    assert torch.isfinite(logits(applied(model, half_of(model, make_plan, "residual")))).all()


def test_states_that_do_not_fit_wait_in_host_memory(monkeypatch: pytest.MonkeyPatch, make_plan: MakePlan) -> None:
    moved: list[bool] = []
    plan = half_of(deep("llama"), make_plan, "residual")
    expected = logits(applied(deep("llama"), plan))
    monkeypatch.setattr(PairedRun, "_kept", lambda _self, tensor: moved.append(True) or tensor.cpu())
    assert torch.equal(logits(applied(deep("llama"), plan)), expected)
    assert moved


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in supported() if name not in ("llama", *MIXTURES)),
    ],
)
def test_fitted_blocks_give_again_what_they_gave(
    model_type: str, monkeypatch: pytest.MonkeyPatch, make_plan: MakePlan
) -> None:
    plan, few = half_of(deep(model_type), make_plan, "residual"), WINDOWS[:4]
    expected, given = logits(applied(deep(model_type), plan, ids=few)), list[nn.Module]()
    monkeypatch.setattr(paired_run, "calling", lambda module, _forward: given.append(module) or nullcontext())
    assert torch.equal(logits(applied(deep(model_type), plan, ids=few)), expected)
    # The attention of each layer, Falcon's state spaces beside them; Nemotron's layers are one block each.
    assert len(set(given)) == {"falcon_h1": 6, "nemotron_h": 0}.get(model_type, 3)


def test_a_model_without_a_last_norm_is_refitted(small: Small) -> None:
    model = small_model(small_config("opt", _remove_final_layer_norm=True))
    plan = small.allocate(0.8, model=model, refit="residual")
    assert plan.recipe.refit == "residual"
    assert logits(small.compress(plan, model=model)).isfinite().all()


IDS = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))


def pair(factor: float, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    own = torch.randn(400, 50)
    return own * factor, own + noise * torch.randn_like(own)


def test_logits_that_are_a_little_too_large_get_their_size_back() -> None:
    assert fitted_scale([pair(0.95)]) == pytest.approx(0.95, abs=0.003)
    assert fitted_scale([pair(1.0)]) == pytest.approx(1, abs=1e-6)
    both = [pair(0.95), pair(1.05)]
    assert fitted_scale(both[:1]) < fitted_scale(both) < fitted_scale(both[1:])


def test_noise_is_answered_by_less_confidence() -> None:
    other, own = pair(1.0, 0.3)
    found = fitted_scale([(other, own)])
    assert found < 0.97
    nearby = [divergence(other, (found + step) * own) for step in (-0.05, 0.05)]
    assert divergence(other, found * own) < min(*nearby, divergence(other, own))


def test_the_scale_stays_near_1_and_logits_that_are_not_finite_are_refused() -> None:
    assert [fitted_scale([pair(factor)]) for factor in (0.0, 9.0)] == [refit.LEAST, refit.MOST]
    assert fitted_scale([(torch.zeros(2, 5), torch.zeros(2, 5))]) == 1
    with pytest.raises(ModelError, match="finite"):
        fitted_scale([(torch.zeros(2, 5), torch.full((2, 5), torch.nan))])


@every_layout
def test_the_last_norm_scales_what_the_head_reads(model_type: str) -> None:
    model = small_model(small_config(model_type))
    name = family_of(model.config).last_norm
    norm = model.get_submodule(name)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    hidden, before = torch.randn(5, norm.get_parameter("weight").numel()), norm.get_parameter("weight").clone()
    copied = scaled_norm(norm, 0.9)
    torch.testing.assert_close(copied(hidden), 0.9 * norm(hidden))
    assert torch.equal(norm.get_parameter("weight"), before)
    read: list[Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _m, given: read.append(given[0]))
    with torch.no_grad():
        model(IDS)
        model.set_submodule(name, copied)
        model(IDS)
    torch.testing.assert_close(read[1], 0.9 * read[0])


@every_layout
def test_logits_of_a_last_layers_output_are_the_models(model_type: str) -> None:
    model = small_model(small_config(model_type, num_hidden_layers=3)).eval()
    weights = weights_of(model.config)
    layers = decoder_layers(model, {layer: [w for w in weights if f".{layer}." in w.name] for layer in range(3)})
    stack = LayerStack(model, layers)
    entered: dict[int, Tensor] = {}
    with torch.no_grad():
        with stack.traced(0, entered.__setitem__):
            expected = model(IDS[:1], use_cache=False).logits[0]
        found = stack.logits(IDS[0], stack.run(2, entered[2]))
        assert torch.equal(found, expected)
        assert torch.equal(model(IDS[:1]).logits[0], expected), "the layers are as they were"


def test_a_layer_with_a_forward_of_its_own_keeps_it() -> None:
    model = small_model(small_config("llama", num_hidden_layers=2)).eval()
    layers = list(model.model.layers)
    own = type(layers[0]).forward.__get__(layers[0])
    layers[0].forward = own
    stack = LayerStack(model, layers)
    entered: dict[int, Tensor] = {}
    with torch.no_grad(), stack.traced(0, entered.__setitem__):
        model(IDS[:1], use_cache=False)
    with torch.no_grad():
        stack.logits(IDS[0], stack.run(1, entered[1]))
    assert layers[0].forward is own
    assert "forward" not in layers[1].__dict__
