"""Plans of two shots: what a user calls, what is kept of them, and what a user gets wrong."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import gac
from gac.allocation.reproduce import allocate_command
from gac.errors import GacError, ModelError, PlanError
from gac.sensitivity import second_shot
from tests.changed import with_recipe
from tests.cli.commands import refused, run
from tests.models.small import small_config, small_model


@pytest.fixture
def options(
    text_file: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What to plan with, where nothing has been measured yet."""
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "home"))
    return {
        "tokenizer": tiny_tokenizer,
        "calibration": f"{text_file}:4x64",
        "profile": "nvidia-h100-80gb-hbm3",
        "progress": False,
    }


def compressed(model: LlamaForCausalLM, plan: gac.Plan, options: dict[str, Any]) -> Any:
    return gac.compress(copy.deepcopy(model), plan, tokenizer=options["tokenizer"], progress=False)


def same(one: Any, other: Any) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


# --- the plan -------------------------------------------------------------------------------------------------------


def test_a_second_shot_plans_with_other_gradients(tiny_model: LlamaForCausalLM, options: dict[str, Any]) -> None:
    one, two = (gac.allocate(tiny_model, 0.6, shots=shots, **options) for shots in (1, 2))
    assert (one.recipe.measure.shots, two.recipe.measure.shots) == (1, 2)
    assert one.prediction.loss != two.prediction.loss
    assert one.prediction.dense_perplexity == two.prediction.dense_perplexity
    assert not one.compare(two).same_prediction
    assert two.summary().count(", seed 0, two shots\n") == 1
    assert "two shots" not in one.summary()


def test_the_same_call_gives_the_same_plan_from_anywhere(
    tiny_model: LlamaForCausalLM, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = gac.allocate(tiny_model, 0.6, shots=2, **options)
    again = gac.allocate(tiny_model, 0.6, shots=2, **options)
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "empty"))
    assert first == again == gac.allocate(tiny_model, 0.6, shots=2, **options)


def test_the_statistics_of_one_shot_are_not_touched(
    tiny_model: LlamaForCausalLM, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = gac.allocate(tiny_model, 0.6, **options)
    files = {path: path.read_bytes() for path in (tmp_path / "home").rglob("*.safetensors")}
    gac.allocate(tiny_model, 0.6, shots=2, **options)
    assert {path: path.read_bytes() for path in files} == files
    assert gac.allocate(tiny_model, 0.6, **options) == before


def test_they_serve_every_budget_and_form(
    tiny_model: LlamaForCausalLM, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gac.allocate(tiny_model, 0.8, shots=2, **options)
    monkeypatch.setattr("gac.compression.statistics.first_shot", lambda *_, **__: pytest.fail("measured again"))
    gac.allocate(tiny_model, 0.6, shots=2, align=False, forms=("low_rank", "head_dim"), fuse=True, **options)
    gac.frontier(tiny_model, shots=2, points=3, **options)


def test_a_point_of_a_frontier_is_the_plan_of_two_shots(
    tiny_model: LlamaForCausalLM, options: dict[str, Any], tmp_path: Path
) -> None:
    found = gac.frontier(tiny_model, points=4, shots=2, **options)
    found.save(tmp_path / "frontier.json")
    plan = gac.allocate(tiny_model, found.points[1].asked, shots=2, **options)
    assert gac.Frontier.load(tmp_path / "frontier.json").plan(1) == replace(plan, sites=without_alternatives(plan))


def without_alternatives(plan: gac.Plan) -> Any:
    return tuple(replace(site, alternatives=()) for site in plan.sites)


def test_an_interrupted_second_shot_goes_on(
    tiny_model: LlamaForCausalLM, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gac.allocate(tiny_model, 0.6, shots=2, **options)
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "other"))
    stream = second_shot.stream_moments

    def cut_short(model: Any, *arguments: Any, **given: Any) -> Iterator[Any]:
        for layer, moments in stream(model, *arguments, **given):
            yield layer, moments
            if model is not tiny_model:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(second_shot, "stream_moments", cut_short)
        with pytest.raises(KeyboardInterrupt):
            gac.allocate(tiny_model, 0.6, shots=2, **options)
    assert len([*(tmp_path / "other").rglob("losses-*")]) == 3  # two layers of one shot, the last of two
    assert gac.allocate(tiny_model, 0.6, shots=2, **options) == whole


# --- the model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refit", ["residual", "update", "none"])
def test_it_is_compressed_saved_and_loaded(
    tiny_model: LlamaForCausalLM, options: dict[str, Any], tmp_path: Path, refit: str
) -> None:
    plan = gac.allocate(tiny_model, 0.6, shots=2, refit=refit, **options)
    plan.save(tmp_path / "plan.json")
    assert gac.Plan.load(tmp_path / "plan.json") == plan
    model = compressed(tiny_model, plan, options)
    gac.save(model, tmp_path / "small", tokenizer=options["tokenizer"])
    again = gac.load(tmp_path / "small")
    assert again.gac_plan == plan
    assert same(again, model)
    assert " --seed 0 --shots 2 -o plan.json" in (tmp_path / "small" / "README.md").read_text(encoding="utf-8")


def test_compressing_takes_the_second_shots_factors_or_measures_them_again(
    tiny_model: LlamaForCausalLM, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = gac.allocate(tiny_model, 0.6, shots=2, **options)
    model = compressed(tiny_model, plan, options)
    assert not same(model, compressed(tiny_model, with_recipe(plan, shots=1), options))
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "empty"))
    assert same(model, compressed(tiny_model, plan, options))


@pytest.mark.parametrize("model_type", ["gpt2", "phi3"])
def test_other_layouts_have_a_second_shot(model_type: str, options: dict[str, Any]) -> None:
    dense: Any = small_model(small_config(model_type))
    plan = gac.allocate(dense, 0.6, shots=2, fuse=True, **options)
    assert plan.prediction.loss != gac.allocate(dense, 0.6, fuse=True, **options).prediction.loss
    model = compressed(dense, plan, options)
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(12)[None]).logits).all()


# --- files ----------------------------------------------------------------------------------------------------------


def edited(plan: gac.Plan, path: Path, **changed: Any) -> Path:
    plan.save(path)
    document = json.loads(path.read_text())
    document |= changed
    path.write_text(json.dumps({name: value for name, value in document.items() if value is not None}))
    return path


def test_a_plan_that_says_nothing_of_shots_is_of_one(
    tiny_model: LlamaForCausalLM, options: dict[str, Any], tmp_path: Path
) -> None:
    plan = gac.allocate(tiny_model, 0.6, **options)
    document = json.loads(edited(plan, tmp_path / "plan.json").read_text())
    del document["shots"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    assert gac.Plan.load(tmp_path / "old.json") == plan
    assert "--shots" not in allocate_command(plan)


@pytest.mark.parametrize("shots", [0, 3, "2", 1.5])
def test_a_plan_of_other_shots_is_refused(
    tiny_model: LlamaForCausalLM, options: dict[str, Any], tmp_path: Path, shots: Any
) -> None:
    plan = gac.allocate(tiny_model, 0.6, **options)
    with pytest.raises(PlanError, match="shots: Input should be 1 or 2"):
        gac.Plan.load(edited(plan, tmp_path / "plan.json", shots=shots))


def test_a_plan_that_no_second_shot_can_have_made_is_not_applied(
    tiny_model: LlamaForCausalLM, options: dict[str, Any]
) -> None:
    plan = gac.allocate(tiny_model, 0.6, method="svd-llm", **options)
    with pytest.raises(GacError, match="shots=2 with method svd-llm"):
        compressed(tiny_model, with_recipe(plan, shots=2), options)


# --- what is refused, and what is said ------------------------------------------------------------------------------


def test_it_is_refused_before_anything_is_measured(
    tiny_model: LlamaForCausalLM, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("gac.api.measure_curves")
    for wrong in ({"shots": 3}, {"shots": 2, "method": "asvd"}, {"shots": 2, "rule": "uniform"}):
        with pytest.raises(GacError, match="shots="):
            gac.allocate(tiny_model, 0.6, **options, **wrong)
    with pytest.raises(GacError, match="shots=2 with method svd"):
        gac.frontier(tiny_model, method="svd", shots=2, **options)


def test_offloaded_weights_have_no_second_shot(
    tiny_model: LlamaForCausalLM, options: dict[str, Any], tmp_path: Path
) -> None:
    accelerate = pytest.importorskip("accelerate")
    parts = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head")
    device_map = dict.fromkeys(parts, "cpu") | {"model.layers.1": "disk"}
    spread = accelerate.dispatch_model(
        copy.deepcopy(tiny_model), device_map, main_device="cpu", offload_dir=tmp_path / "off", force_hooks=True
    )
    with pytest.raises(ModelError) as refused:
        gac.allocate(spread, 0.6, shots=2, **options)
    assert str(refused.value) == (
        "model.layers.1.self_attn.q_proj.weight is offloaded by its device_map, with shots=2; expected every weight in "
        'the memory of a device, where the first shot is made of it. Load the model with device_map="cpu", or use '
        "shots=1."
    )


def test_a_model_with_a_device_map_has_the_same_second_shot(
    tiny_model: LlamaForCausalLM, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerate = pytest.importorskip("accelerate")
    plan = gac.allocate(tiny_model, 0.6, shots=2, **options)
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "own"))
    spread = accelerate.dispatch_model(copy.deepcopy(tiny_model), {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert gac.allocate(spread, 0.6, shots=2, **options) == plan


def test_the_command_line_says_what_two_shots_cost(
    tiny_model: LlamaForCausalLM, options: dict[str, Any], tmp_path: Path
) -> None:
    tiny_model.save_pretrained(tmp_path / "model")
    options["tokenizer"].save_pretrained(tmp_path / "model")
    asked = ("allocate", tmp_path / "model", "--calibration", options["calibration"], "-o", tmp_path / "plan.json")
    result = run(*asked, "--shots", 2)
    assert result.exit_code == 0, result.output
    assert (
        "two shots: calibration takes twice as long and twice the disk, and there has to be room for a second copy of "
        "the weights, compressed to 0.8\n"
    ) in result.stderr
    assert gac.Plan.load(tmp_path / "plan.json").recipe.measure.shots == 2
    small = run("compress", tmp_path / "model", "--plan", tmp_path / "plan.json", "-o", tmp_path / "small")
    assert "or taken again where they are gone (in two shots)" in small.stderr
    assert "two shots" not in run(*asked).stderr
    assert "Error: shots=3; expected 1 or 2. Leave it out for one shot.\n" in refused(*asked, "--shots", 3)
