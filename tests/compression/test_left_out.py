"""Attentions and MLPs that are left out, and attentions with fewer heads, in every family."""

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import gac
from gac.checkpoint.planned import attach_plan
from gac.compression.apply import build_modules, skipped_blocks
from gac.core.errors import CheckpointError, PlanError
from gac.forms import form_named
from gac.forms.curvature.metric import Metric
from gac.forms.curvature.registry import METHODS
from gac.forms.heads.torch import AFTER_REFIT, eliminate_groups
from gac.forms.planned_sites import as_planned, check_forms_fit
from gac.measurement.calibration import CalibrationRun
from gac.measurement.curves import fit_layers, measure_curves
from gac.measurement.joint_losses import ON_TEXT
from gac.measurement.runs import DIFFERS
from gac.models.families import FIXED_HEADS, family_of, supported
from gac.models.modules import swap_in
from gac.models.sites import Weight
from gac.plan.plan import Plan, WeightChoice
from gac.runtime.finish import Description, finish
from gac.runtime.plain.modeling_gac import SkippedBlock
from tests.changed import edited
from tests.compression.applying import IDS, applied, divergence, generates_the_same, logits
from tests.compression.compressed import MakePlan
from tests.models.small import LAYOUTS, STACKED, WITHOUT_HEADS, every_layout, small_config, small_model, weights_of
from tests.small_pipeline import Small, has_state

SKIP = form_named("skip")


def config_of(model_type: str, **changed: Any) -> Any:
    return small_config(model_type, **{"num_hidden_layers": 3, **changed})


def blocks_of(config: Any) -> list[list[Weight]]:
    """The weights of every attention and MLP that can be skipped."""
    found: list[list[Weight]] = [[]]
    for weight in filter(SKIP.applies_to, weights_of(config)):
        found[-1].append(weight)
        if weight.block == "in":
            found.append([])
    assert not found.pop()
    return found


def without(config: Any, blocks: list[list[Weight]]) -> dict[str, tuple[str, int]]:
    return {weight.name: ("skip", 0) for block in blocks for weight in block}


def skipped(config: Any, make_plan: MakePlan, blocks: list[list[Weight]] | None = None) -> tuple[Any, Any, Plan]:
    """The dense model, that without those blocks (all that can go), and the plan."""
    dense = small_model(config)
    plan = make_plan(config, without(config, blocks_of(config) if blocks is None else blocks))
    small = applied(copy.deepcopy(dense), plan)
    return dense, small, plan


@cache
def _of_family(model_type: str, make_plan: MakePlan) -> tuple[Any, Any, Plan]:
    return skipped(config_of(model_type), make_plan)


def of_family(model_type: str, make_plan: MakePlan) -> tuple[Any, Any, Plan]:
    """What ``skipped`` makes of an architecture, made once; the smaller model is a copy of one's own."""
    dense, small, plan = _of_family(model_type, make_plan)
    return dense, copy.deepcopy(small), plan


def leave_out(small: Any, plan: Plan) -> Any:
    """The model, in place, whose skipped blocks run no more."""
    finish(small, Description(skipped=skipped_blocks(small.config, plan.weights)), kernels=False)
    return attach_plan(small, plan)


@every_layout
def test_a_skipped_block_runs_no_weight_and_no_norm_and_generates(model_type: str, make_plan: MakePlan) -> None:
    dense, small, plan = of_family(model_type, make_plan)
    before, state = logits(small), small.state_dict()
    assert not torch.equal(before, logits(dense))
    ran: set[str] = set()
    for name, module in small.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.add(name))
    leave_out(small, plan)
    assert torch.equal(logits(small), before)
    assert small.state_dict().keys() == state.keys()
    assert has_state(small, state)
    assert sum(isinstance(module, SkippedBlock) for module in small.modules()) == len(blocks_of(dense.config))
    assert generates_the_same(small)
    for *others, writing in blocks_of(dense.config):
        assert ran.isdisjoint(weight.name for weight in others)
        assert writing.name in ran
        for norm in family_of(dense.config).norms_of(dense.config, writing.name.rpartition(".")[0]):
            assert isinstance(small.get_submodule(norm), torch.nn.Identity)
            assert norm not in ran


@every_layout
def test_what_can_be_skipped(model_type: str) -> None:
    config = config_of(model_type)
    names = {block[-1].name.rpartition(".")[0].rpartition("layers.")[2] for block in blocks_of(config)}
    layers = {name.partition(".")[0] for name in names}
    assert "0" not in layers
    if model_type == "opt":  # its MLP is no module of its own
        assert names == {"1.self_attn", "2.self_attn"}
    elif model_type == "falcon_h1":  # its MLP multiplies its output
        assert names == {f"{layer}.{block}" for layer in "12" for block in ("mamba", "self_attn")}
    else:
        assert len(names) >= 3


def test_the_first_attention_of_each_kind_and_layers_whose_stream_passes_norms_stay() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    names = {block[-1].name for block in blocks_of(config_of("gemma3_text", layer_types=kinds))}
    assert names == {f"model.layers.{name}" for name in ("1.mlp.down_proj", "2.self_attn.o_proj", "2.mlp.down_proj")}

    config = config_of("opt", do_layer_norm_before=False)
    with pytest.raises(PlanError, match="form skip, which fits no weight of a opt model"):
        check_forms_fit(family_of(config).sites(config), ["skip"], "opt")


@pytest.mark.parametrize(("model_type", "layers"), [("llama", 2), ("gemma2", 3)])
def test_a_block_costs_what_the_model_diverges_without_it(model_type: str, layers: int, make_plan: MakePlan) -> None:
    config = config_of(model_type, num_hidden_layers=layers)
    model = small_model(config)
    sites = as_planned(family_of(config).sites(config), ["skip"], False)
    run = CalibrationRun(model, IDS, METHODS.get("kfac"), progress=False)
    curves = measure_curves(run, sites, forms=["skip"]).curves
    blocks, before = blocks_of(config), logits(model)
    alone, on_text = {}, {}
    for block in blocks:
        name, curve = block[-1].name, curves.of(SKIP, block[-1])
        assert curve is not None
        _, small, _ = skipped(config, make_plan, [block])
        alone[name], on_text[name] = divergence(before, logits(small)), lost(before, logits(small))
        assert curve.loss.tolist() == [pytest.approx(alone[name], rel=1e-4), 0.0]
    blocks.sort(key=lambda block: alone[block[-1].name] / sum(weight.params for weight in block))
    more = {block[-1].name: on_text[block[-1].name] - alone[block[-1].name] for block in blocks[:ON_TEXT]}
    for name in alone:
        assert curves.beyond_sum([("skip", name, 0)]) == pytest.approx(more.get(name, 0), rel=1e-3, abs=1e-8)
        assert curves.beyond_sum([("skip", name, 1)]) == 0
    one, other = blocks[0], blocks[-1]
    _, small, _ = skipped(config, make_plan, [one, other])
    beyond = divergence(before, logits(small)) - sum(alone[block[-1].name] for block in (one, other))
    text = sum(more.get(block[-1].name, 0) for block in (one, other))
    pair = [("skip", block[-1].name, 0) for block in (one, other)]
    assert curves.beyond_sum(pair) == pytest.approx(beyond + text, rel=1e-3, abs=1e-8)


def lost(dense: torch.Tensor, changed: torch.Tensor) -> float:
    """Of all of ``IDS``: the text's loss and the divergence, each weighted by the inverse of its variance."""
    more = token_losses(changed).mean(1) - token_losses(dense).mean(1)
    diverged, noise = divergence(dense, changed), float(more.var()) / len(more)
    bias = (DIFFERS * diverged) ** 2
    return (float(more.mean()) / noise + diverged / bias) / (1 / noise + 1 / bias)


def token_losses(found: torch.Tensor) -> torch.Tensor:
    return -found.log_softmax(-1)[:, :-1].gather(2, IDS[:, 1:, None])[..., 0]


def test_the_constant_is_the_mean_output(make_plan: MakePlan) -> None:
    config = config_of("llama")
    block = blocks_of(config)[0]
    dense, small, _ = skipped(config, make_plan, [block])
    heard: list[torch.Tensor] = []
    with dense.get_submodule(block[-1].name).register_forward_hook(lambda *given: heard.append(given[2])):
        logits(dense)
    torch.testing.assert_close(small.get_parameter(f"{block[-1].name}.bias"), heard[0].mean((0, 1)))


@pytest.fixture
def deep(small: Small) -> Small:
    return replace(small, model=small_model(config_of("llama", num_hidden_layers=4)))


def test_allocate_compress_save_and_load(deep: Small, tmp_path: Path) -> None:
    plan = deep.allocate(0.5, forms=["skip", "low_rank"], latency="any")
    gone = [choice for choice in plan.weights if choice.form == "skip"]
    assert gone
    assert all(choice.params == 0 for choice in gone)
    assert plan.prediction.loss == pytest.approx(sum(site.loss for site in plan.sites) + plan.prediction.together)
    assert f"{plan.prediction.together:+.4f} measured of several together, or on text" in plan.summary()
    small, _ = deep.there_and_back(plan, tmp_path)
    again = gac.load(tmp_path / "small", verify=True)
    described = json.loads((tmp_path / "small" / "config.json").read_text())["gac"]["skipped"]
    for model in (small, again):
        assert sum(isinstance(module, SkippedBlock) for module in model.modules()) == len(described) > 0


def test_a_skipped_attention_caches_nothing(deep: Small) -> None:
    plan = deep.allocate(0.4, forms=["skip"], latency="any")
    numbers, dense = plan.kv_numbers
    small = deep.compress(plan)
    cache = DynamicCache(config=small.config)
    small(IDS, past_key_values=cache)
    layers = (layer for layer in cache.layers if layer.is_initialized)
    assert sum(held[0, :, 0].numel() for layer in layers for held in (layer.keys, layer.values)) == numbers
    gone = sum(choice.form == "skip" and choice.weight.cached for choice in plan.weights) // 2
    assert numbers == dense * (4 - gone) // 4


def test_what_follows_makes_up_for_a_skipped_block(deep: Small) -> None:
    ids = deep.tokenizer(deep.text.read_text()[:256], return_tensors="pt").input_ids
    before, losses = logits(deep.model, ids), []
    for refit in ("none", "residual"):
        plan = deep.allocate(0.6, forms=["skip"], refit=refit, latency="any")
        losses.append(divergence(before, logits(deep.compress(plan, copy.deepcopy(deep.model)), ids)))
    assert losses[1] < losses[0]


def test_what_a_stock_model_cannot_say_is_not_exported(deep: Small, tmp_path: Path) -> None:
    small = deep.compress(deep.allocate(0.6, forms=["skip"], latency="any"))
    with pytest.raises(CheckpointError, match="is skip with dim 0, which adds a constant"):
        gac.export(small, tmp_path / "plain", merge=True, tokenizer=deep.tokenizer)
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2"])
def test_a_merged_model_says_the_same(
    model_type: str, make_plan: MakePlan, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """Where the stock weights have biases, or no constant is added."""
    dense, small, plan = of_family(model_type, make_plan)
    gac.export(leave_out(small, plan), tmp_path / "plain", merge=True, tokenizer=tiny_tokenizer)
    stock = type(dense).from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(logits(stock), logits(small))


BLOCK = {"block": "model.layers.1.self_attn", "output": "o_proj", "norms": [], "attention": True}


@pytest.mark.parametrize(
    "wrong",
    [
        BLOCK["block"],
        BLOCK | {"block": "model.layers.0.self_attn"},
        *(BLOCK | changed for changed in ({"output": "k_norm"}, {"norms": ["model.nothing"]}, {"attention": "yes"})),
    ],
)
def test_a_header_that_skips_what_is_there_is_refused(wrong: Any, make_plan: MakePlan, tmp_path: Path) -> None:
    _, small, plan = of_family("llama", make_plan)
    leave_out(small, plan).save_pretrained(tmp_path)
    with edited(tmp_path / "config.json") as content:
        content["gac"]["skipped"] = [wrong]
    with pytest.raises(ValueError, match=r"key gac: .*skipped"):
        type(small).from_pretrained(tmp_path)


HEADS = form_named("heads")


def applies_to(model_type: str, **changed: Any) -> bool:
    return any(map(HEADS.applies_to, weights_of(small_config(model_type, **changed))))


def test_most_architectures_have_heads_to_drop() -> None:
    fixed = {*STACKED, *FIXED_HEADS, *WITHOUT_HEADS, "llama4_text", "sarvam_moe"}  # with use_qk_norm
    assert {name for name in supported() if not applies_to(name)} == fixed
    assert not applies_to("cohere", use_qk_norm=True)
    assert not any(applies_to("llama", num_key_value_heads=heads) for heads in (1, 3))
    config = small_config("gpt2")
    with pytest.raises(PlanError, match="form heads, which fits no weight of a gpt2 model"):
        check_forms_fit(family_of(config).sites(config), ["heads"], "gpt2")


def test_an_attention_is_one_site() -> None:
    config = small_config("llama")
    planned = as_planned(family_of(config).sites(config), ["heads"], fused=False)
    assert [site.kind for site in planned] == ["q_proj+k_proj+v_proj+o_proj", "mlp"] * 2
    fused = as_planned(family_of(config).sites(config), ["heads"], fused="auto")
    assert [site.fused for site in fused] == [(0, 1, 2), (0, 1)] * 2


def lost_with(weight: Tensor, metric: Metric, kept: Tensor) -> float:
    """tr(G E A E^T) of the best o_proj that reads only these columns."""
    inputs = metric.inputs
    solved = weight @ inputs[:, kept] @ torch.linalg.inv(inputs[kept][:, kept])
    error = weight.clone()
    error[:, kept] -= solved
    return float((metric.gradients @ error @ inputs @ error.T).trace())


def test_groups_go_as_their_loss_says() -> None:
    torch.manual_seed(0)
    groups, length = 4, 6
    weight = torch.randn(10, groups * length, dtype=torch.float64)
    metric = Metric(*(root @ root.T for root in (torch.randn(n, 2 * n, dtype=torch.float64) for n in (24, 10))))
    order = eliminate_groups(weight, metric, groups)
    inside = torch.arange(groups * length).view(groups, length)
    for gone in range(1, groups):
        before = order[: gone - 1].tolist()
        without = {
            group: lost_with(weight, metric, inside[[n for n in range(groups) if n not in [*before, group]]].flatten())
            for group in range(groups)
            if group not in before
        }
        assert order[gone - 1] == min(without, key=lambda group: without[group])


@pytest.mark.parametrize("model_type", filter(applies_to, LAYOUTS))
def test_nothing_is_lost_with_heads_that_write_nothing(model_type: str, make_plan: MakePlan) -> None:
    config = small_config(model_type)
    dense = small_model(config)
    family = family_of(config)
    with torch.no_grad():
        for weight in (weight for weight in weights_of(config) if weight.name.endswith(f".{family.output}")):
            output: Any = dense.get_submodule(weight.name)
            output.weight.view(64, 2, -1)[:, int(".0." in weight.name)] = 0  # another group in each layer
    plan = make_plan(config, {weight.name: ("heads", 1) for weight in weights_of(config) if HEADS.applies_to(weight)})
    small: Any = applied(copy.deepcopy(dense), plan, "svd-llm")
    assert (logits(small) - logits(dense)).abs().max() < 1e-3 * logits(dense).abs().max()
    assert generates_the_same(small)


def test_no_heads_and_more_than_there_are_is_refused(make_plan: MakePlan) -> None:
    config = small_config("llama")
    for dim in (0, 3):
        with pytest.raises(PlanError, match=f"has heads dim {dim}; expected a dim from 1 to 2"):
            make_plan(config, {weight.name: ("heads", dim) for weight in weights_of(config)[:4]})


def test_what_a_number_of_heads_loses_is_measured_by_running_the_model() -> None:
    model = small_model(small_config("llama", num_key_value_heads=4))
    run = CalibrationRun(model, torch.arange(60).reshape(2, 30), METHODS.get("kfac"), progress=False)
    sites = [site for site in as_planned(family_of(model.config).sites(model.config), ["heads"], False) if site.layer]
    fits = fit_layers(run, sites, forms=["heads"])
    attention = sites[0]
    output = attention.weights[-1]
    loss = fits[1].losses[f"heads/{output.name}"]
    assert loss[0] == loss[1]
    assert (loss[:-1] >= loss[1:]).all()
    with torch.no_grad():
        dense = model(run.windows).logits
    measured: dict[int, float] = {}
    for dim in (1, 2, 3):
        choices = [WeightChoice(weight, "heads", dim) for weight in attention.weights]
        fewer = copy.deepcopy(model)
        swap_in(fewer, build_modules(run, choices, [attention], fits))
        with torch.no_grad():
            changed = fewer(run.windows).logits
        measured[dim] = divergence(dense, changed)
    never_rising = [max(measured[other] for other in range(dim, 4)) for dim in (1, 2, 3)]
    assert (loss[1:4] / AFTER_REFIT).tolist() == pytest.approx(never_rising, rel=1e-4)
