"""The pipeline on a tiny model: what a user calls, and what a user gets wrong."""

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import gac
from gac.checkpoint.card import model_card
from gac.core.errors import BudgetError, GacError, ModelError, PlanError, ProfileError, TextError
from gac.plan.costs import floored
from gac.plan.summary import allocate_command
from gac.runtime.fusion.shared_gemm import FusedInput
from gac.runtime.modules import LowRankLinear
from tests.changed import edited
from tests.compression.applying import logits
from tests.compression.compressed import MakePlan
from tests.models.small import small_config, small_model
from tests.small_pipeline import Small, has_state, state_of


def total(model: Any) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if "proj" in name)


PEERS = [{"method": "svd-llm", "rule": rule} for rule in ("sensitivity", "zero-sum:down8")]


@pytest.mark.parametrize(("budget", "options"), [(0.3, {}), *((0.6, peer) for peer in PEERS)], ids=str)
def test_the_budget_is_used_and_never_exceeded(small: Small, budget: float, options: dict[str, Any]) -> None:
    plan = small.allocate(budget, calibration=f"{small.text}:2x64", **options)
    params = total(small.model)
    assert plan.budget.total == params
    assert plan.budget.used <= plan.budget.limit == floored(budget, params)
    if not options:
        assert plan.aligned_fraction == 1
        assert (plan.certificate.status, plan.certificate.gap) == ("optimal", 0)
    assert plan.certificate.method == options.get("rule", plan.certificate.method)
    assert total(small.compress(plan)) == plan.budget.used


def test_nothing_is_lost_at_full_rank(small: Small, tiny_config: LlamaConfig, make_plan: MakePlan) -> None:
    plan, before = small.allocate(1.0), logits(small.model)
    assert {weight.form for weight in plan.weights} == {"dense"}
    assert plan.prediction.loss == 0
    assert torch.equal(logits(small.compress(plan, model=copy.deepcopy(small.model))), before)
    full = {one.name: ("low_rank", min(one.weight.out_features, one.weight.in_features)) for one in plan.weights}
    model = small.compress(replace(make_plan(tiny_config, full), measured=plan.measured))
    assert {type(model.get_submodule(name)) for name in full} == {LowRankLinear}
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-4)


def test_unaligned_dims_lose_no_more(small: Small) -> None:
    aligned, free = small.allocate(0.6), small.allocate(0.6, align=False)
    assert free.prediction.loss <= aligned.prediction.loss
    assert free.aligned_fraction < 1


def test_fused_plans_run_save_and_load(small: Small, tmp_path: Path) -> None:
    plan = small.allocate(0.7, fuse=True)
    assert [site.kind for site in plan.sites[:3]] == ["q_proj+k_proj+v_proj", "o_proj", "mlp"]
    assert plan.prediction.loss == pytest.approx(small.allocate(0.7).prediction.loss)
    chosen = small.allocate(0.7, fuse="auto")
    assert not any(site.shared for site in chosen.sites), "the profile has none of the shapes"
    chosen = replace(chosen, sites=tuple(replace(site, shared=site.kind == "mlp") for site in chosen.sites))
    assert "; fused: 2 mlp" in chosen.summary()
    for name, made, count in (("all", plan, 4), ("mlp", chosen, 2)):
        models = small.there_and_back(made, tmp_path / name, copy.deepcopy(small.model))
        assert [sum(isinstance(one, FusedInput) for one in model.modules()) for model in models] == [count] * 2


@pytest.mark.parametrize("fuse", [False, "auto"])
def test_a_smaller_cache_is_planned_compressed_and_kept(small: Small, tmp_path: Path, fuse: Any) -> None:
    plan = small.allocate(0.8, forms=("low_rank", "narrow", "head_dim"), kv_cache=0.75, fuse=fuse)
    assert plan.kv_numbers == (2 * (32 + 16), 2 * (32 + 32))
    _, again = small.there_and_back(plan, tmp_path)
    cache = again(torch.arange(12)[None], use_cache=True).past_key_values
    assert [layer.values.shape[-1] for layer in cache.layers] == [8, 8]


@pytest.mark.parametrize("forms", [("low_rank",), ("narrow",)])
@pytest.mark.parametrize("model_type", ["gpt2", "opt", "phi3"])
def test_every_layout_is_planned(model_type: str, forms: tuple[str, ...], small: Small, tmp_path: Path) -> None:
    dense = small_model(small_config(model_type, num_hidden_layers=1))
    plan = small.allocate(0.7, forms=forms, fuse=True, model=dense)
    assert {weight.form for weight in plan.weights} - {"dense"} == {*forms}
    model, _ = small.there_and_back(plan, tmp_path, dense)
    targeted = tuple(f"{weight.name}." for weight in plan.weights)
    stored = model.state_dict().items()
    counted = sum(value.numel() for name, value in stored if name.startswith(targeted) and name.endswith("weight"))
    assert counted == plan.budget.used


def test_kept_statistics_are_not_needed(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small.allocate(0.7)
    first = small.compress(plan, model=copy.deepcopy(small.model))
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "empty"))
    assert has_state(first, state_of(small.compress(plan)))


def test_profiles_of_other_hardware(small: Small, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO, logger="gac"):
        plan = small.allocate(0.7, profile=None)
    assert plan.measured.profile.gpu == "NVIDIA H100 80GB HBM3"
    assert plan.measured.profile.note == "no GPU here, so the shipped table"
    assert "profile of NVIDIA H100 80GB HBM3: no GPU here, so the shipped table" in caplog.text
    shipped = gac.Profile.load("nvidia-h100-80gb-hbm3").path
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    note = small.allocate(0.8).measured.profile.note
    assert note == "asked for by name; the GPU here is NVIDIA A100"
    with pytest.raises(ProfileError, match=r"was measured on NVIDIA H100 .*; expected one of .*, NVIDIA A100"):
        small.allocate(0.8, profile=shipped)
    with pytest.raises(ProfileError, match=r"the GPU here, NVIDIA A100, has no profile yet"):
        small.allocate(0.8, profile=None)


def test_a_form_that_the_dense_model_makes_needless_is_not_measured(
    small: Small, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"forms": ("low_rank", "skip"), "fuse": "auto", "latency": "any"}
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, logger="gac"):
        patch.setattr("gac.measurement.curves._measure_by_runs", None)
        plan = small.allocate(1.0, **asked)
    assert "the dense model is within every limit: form skip is not measured" in caplog.text
    assert plan.recipe.space.forms == ("low_rank",)
    assert {weight.form for weight in plan.weights} == {"dense"}
    with monkeypatch.context() as patch:
        patch.setattr("gac.api.without_needless_runs", lambda resolved, _profile: resolved)
        assert small.allocate(1.0, **asked).weights == plan.weights
    assert "skip" in small.allocate(0.7, **asked).recipe.space.forms


def test_unknown_latencies_are_said_and_not_invented(small: Small) -> None:
    plan = small.allocate(0.7)
    assert [(w.dense_ns, w.plan_ns, w.unknown) for w in plan.workloads] == [(None, None, 14)] * 2
    with pytest.raises(ProfileError, match=r"the profile lacks the latency of model.layers.0.self_attn.q_proj"):
        small.allocate(0.7, latency=0.9)


def test_what_cannot_be_reached_or_measured_is_named(small: Small) -> None:
    with pytest.raises(BudgetError) as failure:
        small.allocate(0.01)
    smallest = float(failure.value.remedy.split("budget of ")[1].split(" or more")[0])
    assert failure.value.given == "a limit of 921 of 92,160 parameters (0.00999349)"
    small.allocate(smallest)
    with pytest.raises(BudgetError):
        small.allocate(smallest - 2e-5)
    with pytest.raises(ModelError, match="calibration windows of 600 tokens for a model of 512 positions"):
        small.allocate(0.8, calibration=f"{small.text}:1x600")
    with torch.no_grad():
        small.model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds 1 NaN"):
        small.allocate(0.8)


def test_a_plan_for_other_weights_is_refused_and_nothing_is_changed(small: Small) -> None:
    plan = small.allocate(0.7)
    with torch.no_grad():
        small.model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    before = state_of(small.model)
    with pytest.raises(PlanError, match=r"that the plan was made for"):
        small.compress(plan)
    assert has_state(small.model, before)


@pytest.mark.parametrize(
    ("budget", "options", "forms"),
    [
        (0.5, {"method": "palu:1"}, {("k_proj", "latent:1"), ("v_proj", "latent:1")}),
        (0.5, {"method": "palu:1", "rule": "fisher:nearest8"}, {("k_proj", "latent:1"), ("v_proj", "latent:1")}),
        (0.6, {"method": "palu-fold"}, {("k_proj", "latent:1"), ("v_proj", "head_dim"), ("o_proj", "head_dim")}),
    ],
    ids=["palu", "palu by fisher", "folded"],
)
def test_palu_takes_the_budget_for_the_kv_cache(small: Small, budget: float, options: Any, forms: Any) -> None:
    plan = small.allocate(budget, **options)
    _, cache = plan.limits
    assert (cache.column, cache.asked, cache.limit, cache.total) == ("kv_numbers", budget, int(128 * budget), 128)
    assert cache.over == max(0, cache.used - cache.limit)
    changed = {(weight.name.rpartition(".")[2], weight.form) for weight in plan.weights if weight.form != "dense"}
    assert changed <= forms
    assert "o_proj" not in dict(forms) or ("o_proj", "head_dim") in changed
    assert total(small.compress(plan)) == plan.budget.used


def test_a_frontier_of_palu_is_over_the_cache(small: Small) -> None:
    with pytest.raises(GacError, match=r"a frontier of method palu:1 over 'params'; .* Limit kv_numbers\."):
        small.frontier(method="palu:1")
    found = small.frontier(method="palu:1", limit="kv_numbers", points=4, align=False)
    for at, point in enumerate(found.points):
        plan = small.allocate(point.asked, method="palu:1", align=False)
        assert found.plan(at).recipe.limits == plan.recipe.limits
        assert found.plan(at).prediction == plan.prediction
    refused = r"over kv_numbers with forms low_rank; .* smaller: kv_bits .*, latent .*\. Add one"
    with pytest.raises(BudgetError, match=refused):
        small.frontier(forms=["low_rank"], limit="kv_numbers")
    how = {name: small.options[name] for name in ("calibration", "profile")}
    recipe = gac.Recipe.of(method="palu:1", align=False, **how)
    again = gac.frontier(small.model, recipe=recipe, limit="kv_numbers", points=4, tokenizer=small.tokenizer)
    assert again.points == found.points


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ({"method": "palu:1", "kv_cache": 0.5}, "--budget 1.0 --method palu:1 --form latent:1 --kv-cache 0.5 "),
        ({"align": 16}, "--budget 0.7 --method kfac --form low_rank --form narrow --align-to 16 "),
        ({"align": False}, "--budget 0.7 --method kfac --form low_rank --form narrow --no-align "),
    ],
)
def test_the_card_says_how_a_plan_was_made(small: Small, given: dict[str, Any], command: str) -> None:
    budget = float(command.split()[1])
    assert command in model_card(small.allocate(budget, **given))


def test_documents_are_named_and_never_evaluated_on(small: Small, prose: str, tmp_path: Path) -> None:
    documents = [prose[start : start + 400] for start in range(0, 2000, 400)]
    plan = small.allocate(0.7, calibration=gac.Documents(documents, windows=4, length=64))
    text = plan.measured.calibration
    assert (text.text, text.windows, text.window_tokens) == ("5 documents given in memory", 4, 64)
    assert text.documents == gac.Documents(documents).digests
    with pytest.raises(PlanError, match=r"^a plan calibrated on 5 documents given in memory; expected the same"):
        small.compress(plan)
    with pytest.raises(PlanError, match=r"calibration text 5 documents given in memory has digest .* here; expected"):
        small.compress(plan, calibration=documents[::-1])
    plan.save(tmp_path / "plan.json")
    model = small.compress(gac.Plan.load(tmp_path / "plan.json"), calibration=iter(documents))
    assert total(model) == plan.budget.used
    with pytest.raises(TextError, match=r"^1 of 2 documents given in memory, the first at position 1, are among the p"):
        gac.perplexity(model, small.tokenizer, ["new words " * 20, documents[2]], length=64)
    measured = gac.perplexity(model, small.tokenizer, ["new words " * 20], length=64, progress=False)
    assert measured.protocol.startswith("1 document given in memory, 3 windows x 64 from token 0, non-overlapping, BO")


def test_several_texts_are_calibrated_on_together_and_found_again(small: Small, tmp_path: Path) -> None:
    other_text = tmp_path / "other.txt"
    other_text.write_text("0123 + 456 = 579; 78 * 9 = 702. " * 100, encoding="utf-8")
    texts = [f"{small.text}:4x64", f"{other_text}:2x64"]
    plan = small.allocate(0.7, calibration=texts)
    made = plan.measured.calibration
    assert plan.recipe.measure.text == tuple(texts)
    assert [(one.text, one.windows) for one in made.parts] == [(str(small.text), 4), (str(other_text), 2)]
    assert f"calibration  6 x 64 tokens of {small.text} (4) and {other_text} (2), BOS" in plan.summary()
    assert f"--calibration {texts[0]} --calibration {texts[1]}" in allocate_command(plan)
    again = gac.allocate(small.model, recipe=plan.recipe, tokenizer=small.tokenizer, progress=False)
    assert again.measured == plan.measured
    with pytest.raises(PlanError, match=rf"^calibration on {small.text}; expected {small.text} \(4\) and {other_text}"):
        small.compress(plan, calibration=str(small.text))
    with pytest.raises(PlanError, match="has digest"):
        small.compress(plan, calibration=texts[::-1])
    model, _ = small.there_and_back(plan, tmp_path, copy.deepcopy(small.model))
    assert total(model) == plan.budget.used
    moved = other_text.rename(tmp_path / "moved.txt")
    assert total(small.compress(plan, calibration=[texts[0], f"{moved}:2x64"])) == plan.budget.used


def test_every_window_begins_with_bos_where_the_tokenizer_puts_it_first(small: Small, tmp_path: Path) -> None:
    with_bos, without = small.allocate(0.7), small.allocate(0.7, bos=False)
    assert [plan.measured.calibration.bos for plan in (with_bos, without)] == [True, False]
    assert with_bos.measured.calibration.digest != without.measured.calibration.digest
    assert f"calibration  4 x 64 tokens of {small.text}, BOS at the head of every window, seed 0" in with_bos.summary()
    assert f"calibration  4 x 64 tokens of {small.text}, no BOS, seed 0" in without.summary()
    assert "BOS at the head of every window" in model_card(with_bos)
    assert "--no-bos" in allocate_command(without)
    assert "bos" not in allocate_command(with_bos)
    without.save(tmp_path / "plan.json")
    with edited(tmp_path / "plan.json") as document:
        del document["measured"]["calibration"]["bos"], document["recipe"]["measure"]["bos"]
    old = gac.Plan.load(tmp_path / "plan.json")
    assert old.measured == without.measured
    assert total(small.compress(old)) == without.budget.used


def test_a_bos_outside_of_the_vocabulary_is_refused(small: Small, tiny_config: LlamaConfig, monkeypatch: Any) -> None:
    monkeypatch.setattr("gac.measurement.session.calibration_runs", None)
    tiny_config.vocab_size = 256
    tiny_config.bos_token_id = tiny_config.eos_token_id = tiny_config.pad_token_id = 1
    with pytest.raises(TextError, match=r"token id 256 on .*, its BOS; expected ids below the model's vocabulary"):
        small.allocate(0.7, model=LlamaForCausalLM(tiny_config))


def test_a_base_model_is_compressed_while_it_is_loaded(directory: Path, small: Small, tmp_path: Path) -> None:
    plan = small.allocate(0.7, model=directory, tokenizer=None)
    config = gac.GacConfig(plan)
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, quantization_config=config)
    model = gac.compress(directory, plan, progress=False)
    assert type(loaded) is type(model)
    assert loaded.gac_plan == plan
    assert torch.equal(logits(loaded), logits(model.cpu()))
    loaded.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    assert torch.equal(logits(gac.load(tmp_path / "saved").cpu()), logits(loaded))
    with pytest.raises(PlanError, match=r"the model's config and weights have digest .*; expected .*, those of"):
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, quantization_config=config)
