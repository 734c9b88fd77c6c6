"""The pipeline on a tiny model: what a user calls, and what a user gets wrong."""

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, MixtralConfig

import gac
from gac.allocation.limits import floored
from gac.checkpoint.card import model_card
from gac.errors import BudgetError, GacError, ModelError, PlanError, ProfileError, TextError
from gac.plan import SiteChoice
from gac.runtime.decode import DecodeLinear
from gac.runtime.modules import LowRankLinear
from gac.runtime.shared_gemm import FusedInput
from tests.changed import with_recipe
from tests.models.small import small_config, small_model
from tests.small_pipeline import Small


def total(model: LlamaForCausalLM) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if "proj" in name)


@pytest.mark.parametrize("budget", [1.0, 0.8, 0.5, 0.3])
def test_the_budget_is_used_and_never_exceeded(small: Small, budget: float) -> None:
    plan = small.allocate(budget)
    whole = total(small.model)
    assert plan.budget.total == whole
    assert plan.budget.used <= plan.budget.limit == floored(budget, whole)
    assert plan.aligned_fraction == 1
    assert plan.certificate.status == "optimal"
    assert plan.certificate.gap == 0
    model = small.compress(plan)
    assert total(model) == plan.budget.used


def test_unaligned_dims_lose_no_more(small: Small) -> None:
    aligned = small.allocate(0.6)
    free = small.allocate(0.6, align=False)
    assert free.prediction.loss <= aligned.prediction.loss
    assert free.aligned_fraction < 1


def test_dims_can_be_multiples_of_a_number(small: Small) -> None:
    plan = small.allocate(0.7, align=16)
    assert plan.recipe.space.align == 16
    assert {weight.dim % 16 for weight in plan.weights if weight.form != "dense"} == {0}


def test_a_fused_plan_runs_saves_and_loads(small: Small, tmp_path: Path) -> None:
    plan = small.allocate(0.7, fuse=True)
    assert [site.kind for site in plan.sites[:3]] == ["q_proj+k_proj+v_proj", "o_proj", "mlp"]
    assert plan.prediction.loss == pytest.approx(small.allocate(0.7).prediction.loss)
    model = small.compress(plan, model=copy.deepcopy(small.model))
    assert sum(isinstance(module, FusedInput) for module in model.modules()) == 4
    gac.save(model, tmp_path / "fused", tokenizer=small.tokenizer)
    again = gac.load(tmp_path / "fused").to(model.device)
    assert sum(isinstance(module, FusedInput) for module in again.modules()) == 4
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    apart = small.compress(replace(with_recipe(plan, fuse=False), sites=unfused(plan)))
    with torch.no_grad():
        assert (apart(ids).logits - model(ids).logits).abs().max() < 1e-4


def test_a_plan_that_chooses_what_is_fused_runs_and_is_read_back(small: Small, tmp_path: Path) -> None:
    plan = small.allocate(0.7, fuse="auto")
    assert not any(site.shared for site in plan.sites), "the profile has none of the shapes"
    sites = tuple(replace(site, shared=site.kind == "mlp") for site in plan.sites)
    chosen = replace(plan, sites=sites)
    chosen.save(tmp_path / "plan.json")
    assert gac.Plan.load(tmp_path / "plan.json") == chosen
    assert "; fused: 2 mlp" in chosen.summary()
    model = small.compress(chosen)
    gac.save(model, tmp_path / "small", tokenizer=small.tokenizer)
    again = gac.load(tmp_path / "small")
    for one in (model, again):
        assert sum(isinstance(module, FusedInput) for module in one.modules()) == 2
    assert "--fuse-where-faster" in (tmp_path / "small" / "README.md").read_text(encoding="utf-8")


def test_a_plan_for_one_row_in_triton_runs_saves_and_loads(small: Small, tmp_path: Path) -> None:
    plan = small.allocate(0.7, decode_kernel="triton", fuse=True, workloads=["prefill:1x64"])
    assert plan.recipe.deployment.triton
    assert {weight.dim % 16 for weight in plan.weights if weight.form != "dense"} == {0}
    model = small.compress(plan)
    gac.save(model, tmp_path / "small", tokenizer=small.tokenizer)
    again = gac.load(tmp_path / "small").to(model.device)
    for one in (model, again):
        assert isinstance(one.model.layers[0].mlp.down_proj, DecodeLinear | LowRankLinear)
        assert sum(isinstance(module, DecodeLinear) for module in one.modules()) > 2
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
        assert torch.equal(again(ids[:, :1]).logits, model(ids[:, :1]).logits)


def test_one_row_in_triton_asks_for_latencies_of_its_own(small: Small) -> None:
    with pytest.raises(ProfileError, match="q_proj for decode:1@1024 in Triton; expected a profile of this model's"):
        small.allocate(0.7, decode_kernel="triton")


@pytest.mark.parametrize("fuse", [False, True, "auto"])
def test_a_smaller_cache_is_planned_compressed_and_kept(small: Small, tmp_path: Path, fuse: Any) -> None:
    forms = ("low_rank", "narrow", "head_dim")
    plan = small.allocate(0.8, forms=forms, kv_cache=0.75, fuse=fuse)
    assert plan.kv_numbers == (2 * (32 + 16), 2 * (32 + 32))
    plan.save(tmp_path / "plan.json")
    assert gac.Plan.load(tmp_path / "plan.json") == plan
    model = small.compress(plan)
    gac.save(model, tmp_path / "small", tokenizer=small.tokenizer)
    again = gac.load(tmp_path / "small").to(model.device)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        found = again(ids, use_cache=True)
        assert torch.equal(found.logits, model(ids).logits)
    assert [layer.values.shape[-1] for layer in found.past_key_values.layers] == [8, 8]


def test_a_cache_that_no_form_makes_smaller_is_refused_at_once(small: Small) -> None:
    with pytest.raises(BudgetError, match="add the form head_dim"):
        small.allocate(0.8, kv_cache=0.75)
    with pytest.raises(GacError, match="rule uniform with a KV-cache limit"):
        small.allocate(0.8, kv_cache=0.75, rule="uniform")


def unfused(plan: gac.Plan) -> tuple[SiteChoice, ...]:
    """The same choices, with q, k and v in sites of their own."""
    sites: list[SiteChoice] = []
    for site in plan.sites:
        if site.kind.startswith("q_proj"):
            for weight in site.weights:
                kind = weight.name.rpartition(".")[2]
                sites.append(
                    replace(
                        site,
                        site=weight.name,
                        kind=kind,
                        weights=(weight,),
                        params=weight.params,
                        dense_params=weight.weight.params,
                        alternatives=(),
                    )
                )
        else:
            sites.append(site)
    return tuple(sites)


def test_a_fused_model_generates_with_the_cache_as_without(small: Small) -> None:
    plan = small.allocate(0.6, fuse=True)
    model: Any = small.compress(plan)
    ids = torch.arange(8)[None]
    said = [model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*said)


def test_the_same_call_gives_the_same_plan(small: Small, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        small.allocate(0.7).save(tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_keeping_everything_keeps_everything_dense(small: Small) -> None:
    plan = small.allocate(1.0)
    assert {weight.form for weight in plan.weights} == {"dense"}
    assert plan.prediction.loss == 0


def test_compressing_does_not_need_the_kept_statistics(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = small.allocate(0.7)
    other = copy.deepcopy(small.model)
    first = small.compress(plan)
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "empty"))
    second = small.compress(plan, model=other)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert gac.allocate is not None


def test_the_shipped_table_stands_in_where_there_is_no_gpu(
    small: Small, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO, logger="gac"):
        plan = small.allocate(0.7, profile=None)
    assert plan.measured.profile.gpu == "NVIDIA H100 80GB HBM3"
    assert plan.measured.profile.note == "no GPU here, so the shipped table"
    assert "profile of NVIDIA H100 80GB HBM3: no GPU here, so the shipped table" in caplog.text


def test_unknown_latencies_are_said_and_not_invented(small: Small) -> None:
    plan = small.allocate(0.7)
    assert [(w.dense_ns, w.plan_ns, w.unknown) for w in plan.workloads] == [(None, None, 14)] * 2
    with pytest.raises(ProfileError, match=r"the profile lacks the latency of model.layers.0.self_attn.q_proj"):
        small.allocate(0.7, latency=0.9)


def test_an_unreachable_budget_says_what_can_be_reached(small: Small) -> None:
    with pytest.raises(BudgetError) as failure:
        small.allocate(0.01)
    smallest = float(failure.value.remedy.split("budget of ")[1].split(" or more")[0])
    assert failure.value.given == "a limit of 921 of 92,160 parameters (0.00999349)"
    small.allocate(smallest)
    with pytest.raises(BudgetError):
        small.allocate(smallest - 2e-5)


def test_a_mixture_of_experts_is_refused_before_its_weights_are_read(small: Small, tmp_path: Path) -> None:
    MixtralConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelError) as failure:
        small.allocate(0.8, model=tmp_path)
    assert str(failure.value) == (
        "model type 'mixtral', a mixture of experts (8 experts a layer); expected one MLP a layer, which every token "
        "passes. Use a dense model: experts have no loss curves."
    )


@pytest.mark.parametrize("forms", [("low_rank",), ("narrow",)])
@pytest.mark.parametrize("model_type", ["glm", "gpt2", "gpt_neox", "opt", "phi3"])
def test_every_layout_is_planned_compressed_and_saved(
    model_type: str, forms: tuple[str, ...], small: Small, tmp_path: Path
) -> None:
    dense = small_model(small_config(model_type))
    plan = small.allocate(0.7, forms=forms, fuse=True, model=dense)
    assert {weight.form for weight in plan.weights} == {"dense", *forms}
    plan.save(tmp_path / "plan.json")
    assert gac.Plan.load(tmp_path / "plan.json") == plan
    model = small.compress(plan, model=dense)
    targeted = tuple(f"{weight.name}." for weight in plan.weights)
    stored = model.state_dict().items()
    counted = sum(value.numel() for name, value in stored if name.startswith(targeted) and name.endswith("weight"))
    assert counted == plan.budget.used
    gac.save(model, tmp_path / "small", tokenizer=small.tokenizer)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(gac.load(tmp_path / "small")(ids).logits, model(ids).logits)


def test_a_form_that_fits_no_weight_is_refused(small: Small) -> None:
    model = small_model(small_config("gpt2"))
    with pytest.raises(PlanError) as failure:
        small.allocate(0.8, forms=("low_rank", "head_dim"), model=model)
    assert str(failure.value) == (
        "form head_dim, which fits no weight of a gpt2 model; expected one of dense, low_rank, narrow. Leave it out."
    )


def test_a_cache_that_no_form_can_make_smaller_is_refused(small: Small) -> None:
    with pytest.raises(BudgetError) as failure:
        small.allocate(0.8, kv_cache=0.75, model=small_model(small_config("phi3")))
    assert str(failure.value) == (
        "a KV-cache limit of 0.75; expected at least 1.0000, the smallest that forms low_rank, narrow can reach. "
        "Allow more."
    )


def test_weights_that_are_not_finite_are_named(small: Small) -> None:
    with torch.no_grad():
        small.model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds 1 NaN"):
        small.allocate(0.8)


def test_short_calibration_text_says_how_short(small: Small, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too little text", encoding="utf-8")
    with pytest.raises(TextError, match=r"15 tokens"):
        small.allocate(0.8, calibration=f"{short}:4x64")


def test_an_unreadable_profile_is_refused(small: Small, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n", encoding="utf-8")
    with pytest.raises(ProfileError, match=r"bad\.jsonl"):
        small.allocate(0.8, profile=bad)


def test_a_profile_of_other_hardware_is_used_by_name_only(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = gac.Profile.load("nvidia-h100-80gb-hbm3").path
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    note = small.allocate(0.8).measured.profile.note
    assert note == "asked for by name; the GPU here is NVIDIA A100"
    with pytest.raises(
        ProfileError, match=r"was measured on NVIDIA H100 80GB HBM3; expected one of the GPU here, NVIDIA A100"
    ):
        small.allocate(0.8, profile=shipped)
    with pytest.raises(ProfileError, match=r"the GPU here, NVIDIA A100, has no profile yet"):
        small.allocate(0.8, profile=None)


def test_a_plan_for_other_weights_is_refused_and_nothing_is_changed(small: Small) -> None:
    plan = small.allocate(0.7)
    with torch.no_grad():
        small.model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    before = copy.deepcopy(small.model.state_dict())
    with pytest.raises(PlanError, match=r"that the plan was made for"):
        small.compress(plan)
    assert all(torch.equal(before[name], value) for name, value in small.model.state_dict().items())


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("method", "magic", "method 'magic' is unknown"),
        ("forms", ("sparse",), "form 'sparse' is unknown"),
        ("workloads", ("prefill",), "workload 'prefill'"),
    ],
)
def test_wrong_names_are_named(small: Small, option: str, value: Any, message: str) -> None:
    with pytest.raises(gac.GacError, match=message):
        small.allocate(0.8, **{option: value})


def test_saving_without_a_tokenizer_is_said(small: Small, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = small.allocate(0.7)
    model = small.compress(plan)
    gac.save(model, tmp_path / "checkpoint")
    assert "saving without a tokenizer: the model 'LlamaForCausalLM in memory' came without a tokenizer" in caplog.text
    assert gac.load(tmp_path / "checkpoint").gac_plan == plan


@pytest.mark.parametrize("rule", ["zero-sum", "sensitivity", "zero-sum:down8"])
def test_a_peers_rule_asks_the_model_what_it_needs(small: Small, rule: str) -> None:
    plan = small.allocate(0.6, method="svd-llm", rule=rule)
    assert plan.certificate.method == rule
    assert plan.budget.used <= plan.budget.limit
    model = small.compress(plan)
    assert total(model) == plan.budget.used


# --- PaLU -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["loss", "uniform", "fisher", "fisher:nearest8"])
def test_palu_takes_the_budget_for_the_kv_cache(small: Small, rule: str) -> None:
    plan = small.allocate(0.5, method="palu:1", rule=rule)
    assert plan.recipe.space.forms == ("grouped:1",)
    _, cache = plan.limits
    assert (cache.column, cache.asked, cache.limit, cache.total) == ("kv_numbers", 0.5, 64, 128)
    assert cache.over == max(0, cache.used - 64)
    changed = {weight.name.rpartition(".")[2] for weight in plan.weights if weight.form != "dense"}
    assert changed <= {"k_proj", "v_proj"}
    model = small.compress(plan)
    assert total(model) == plan.budget.used


def test_folded_values_are_cached_shorter(small: Small) -> None:
    plan = small.allocate(0.6, method="palu-fold")
    _, cache = plan.limits
    assert cache.used <= cache.limit == 76
    forms = {(weight.name.rpartition(".")[2], weight.form) for weight in plan.weights if weight.form != "dense"}
    assert forms <= {("k_proj", "grouped:1"), ("v_proj", "head_dim"), ("o_proj", "head_dim")}
    assert ("o_proj", "head_dim") in forms
    model = small.compress(plan)
    assert total(model) == plan.budget.used


def test_the_exact_choice_loses_least_of_all_rules(small: Small) -> None:
    free = {"align": False}
    loss, peer = (small.allocate(0.5, method="palu:1", rule=rule, **free) for rule in ("loss", "uniform"))
    assert loss.certificate.status == "optimal"
    assert peer.certificate.lower_bound == pytest.approx(loss.prediction.loss)
    assert loss.prediction.loss < peer.prediction.loss


def test_more_of_the_cache_than_the_rule_was_allowed_is_said(small: Small) -> None:
    plan = small.allocate(0.4, method="palu:1", rule="uniform:up8", align=False)
    assert "KV cache     64 of 128 numbers a token: 0.5000 kept, 51 allowed, overshot by 13" in plan.summary()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"method": "palu", "forms": ("narrow",)},
            "method palu with forms narrow; expected its own, grouped. Leave the forms out.",
        ),
        (
            {"method": "palu:2", "kv_cache": 0.5},
            "method palu:2 with budget 0.8 and a KV-cache limit of 0.5; expected a budget alone, which is the kept "
            "fraction of the KV cache. Drop the KV-cache limit.",
        ),
        (
            {"forms": ("grouped",)},
            "form grouped with method kfac; expected method palu, which measures groups of heads. Use method='palu'.",
        ),
    ],
)
def test_palu_and_its_form_go_together(small: Small, given: dict[str, Any], message: str) -> None:
    with pytest.raises(GacError) as caught:
        small.allocate(0.8, **given)
    assert str(caught.value) == message


def test_there_is_no_frontier_of_palu(small: Small) -> None:
    with pytest.raises(GacError, match="a frontier of method palu"):
        small.frontier(method="palu")
    with pytest.raises(GacError, match="form grouped with method kfac"):
        small.frontier(forms=("grouped",))


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ({"method": "palu:1", "kv_cache": 0.5}, "--budget 1.0 --method palu:1 --form grouped:1 --kv-cache 0.5 "),
        ({"forms": ("head_dim",), "kv_cache": 0.75}, "--budget 1.0 --method kfac --form head_dim --kv-cache 0.75 "),
        ({"align": 16}, "--budget 0.7 --method kfac --form low_rank --form narrow --align-to 16 "),
        ({"align": False}, "--budget 0.7 --method kfac --form low_rank --form narrow --no-align "),
    ],
)
def test_the_card_says_how_a_plan_was_made(small: Small, given: dict[str, Any], command: str) -> None:
    budget = float(command.split()[1])
    assert command in model_card(small.allocate(budget, **given))


# --- documents as calibration text ----------------------------------------------------------------------------------


@pytest.fixture
def documents(prose: str) -> list[str]:
    return [prose[start : start + 400] for start in range(0, 2000, 400)]


@pytest.fixture
def documented(small: Small, documents: list[str]) -> gac.Plan:
    """A plan that was calibrated on documents in memory."""
    text = gac.Documents(documents, windows=4, length=64)
    return small.allocate(0.7, calibration=text)


def test_a_plan_says_which_documents_it_was_calibrated_on(documented: gac.Plan, documents: list[str]) -> None:
    text = documented.measured.calibration
    assert (text.text, text.windows, text.window_tokens) == ("5 documents given in memory", 4, 64)
    assert text.documents == gac.Documents(documents).digests


def test_documents_are_given_again_to_compress(
    small: Small, documented: gac.Plan, documents: list[str], tmp_path: Path
) -> None:
    documented.save(tmp_path / "plan.json")
    plan = gac.Plan.load(tmp_path / "plan.json")
    model = small.compress(plan, calibration=iter(documents))
    assert total(model) == plan.budget.used


def test_compress_asks_for_the_documents(small: Small, documented: gac.Plan) -> None:
    with pytest.raises(PlanError) as caught:
        small.compress(documented)
    assert str(caught.value) == (
        "a plan calibrated on 5 documents given in memory; expected the same documents, whose windows have digest "
        f"{documented.measured.calibration.digest[:12]}. Pass them: gac.compress(model, plan, calibration=documents)."
    )


def test_other_documents_are_refused(small: Small, documented: gac.Plan, documents: list[str]) -> None:
    with pytest.raises(PlanError, match=r"calibration text 5 documents given in memory has digest .* here; expected"):
        small.compress(documented, calibration=documents[::-1])


def test_a_file_that_has_moved_is_named_to_compress(small: Small, text_file: Path) -> None:
    plan = small.allocate(0.7)
    moved = text_file.rename(text_file.with_name("moved.txt"))
    model = small.compress(plan, calibration=str(moved))
    assert total(model) == plan.budget.used


def test_a_model_is_not_evaluated_on_its_calibration_documents(
    small: Small, documented: gac.Plan, documents: list[str]
) -> None:
    reader = small.tokenizer
    model = gac.compress(small.model, documented, calibration=documents, tokenizer=reader, progress=False)
    with pytest.raises(TextError) as caught:
        gac.perplexity(model, reader, ["new words " * 20, documents[2]], length=64)
    assert str(caught.value) == (
        "1 of 2 documents given in memory, the first at position 1, are among the plan's calibration text; expected "
        "text that the model was not calibrated on. Hold documents back for evaluation."
    )
    held_back = gac.perplexity(model, reader, ["new words " * 20], length=64, progress=False)
    assert held_back.protocol == "1 document given in memory, 3 windows x 64 from token 0, non-overlapping, no BOS"
