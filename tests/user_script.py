"""What a user writes: every public name, with the type that a checker has to know it by. It is checked, never run."""
# pyright: strict

from collections.abc import Iterable
from pathlib import Path
from typing import assert_type

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import gac
from gac import plots
from gac.plan.plan import Certificate, PlanComparison, WeightChoice


def plan(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> gac.Plan:
    by_name = gac.allocate("smollm2", 0.8, forms="low_rank", workloads="prefill:1x1024")
    assert_type(by_name, gac.Plan)
    recipe = gac.Recipe.of(0.7, method="svd-llm", rule="uniform:down8", refit="none")
    assert_type(recipe, gac.Recipe)
    recipe.save("recipe.json")
    assert_type(gac.Recipe.load(Path("recipe.json")).rule, str)
    gac.allocate(model, recipe="recipe.json", tokenizer=tokenizer, solve_again=True)
    made = gac.allocate(
        model,
        budget="6B",
        tokenizer=tokenizer,
        calibration=gac.Documents(["one", "two"], windows=4, length=64),
        profile=gac.Profile.load("nvidia-h100-80gb-hbm3"),
        forms=["low_rank", "narrow"],
        latency={"prefill:1x1024": 0.9},
        seed=1,
        slack=0.0,
        check_text="notes.txt",
    )
    assert_type(made.certificate, Certificate)
    assert_type(made.weights, tuple[WeightChoice, ...])
    assert_type(made.summary(), str)
    assert_type(made.compare("other.json"), PlanComparison)
    return made


def budgets(model: PreTrainedModel) -> None:
    found = gac.frontier(model, points=10, limit="prefill:1x1024", shots=1)
    assert_type(found, gac.Frontier)
    assert_type(found.plan(3), gac.Plan)
    assert_type([point.perplexity for point in found.points], list[float])


def compress(made: gac.Plan) -> None:
    assert_type(gac.GacConfig("plan.json").plan, gac.Plan)
    small = gac.compress("smollm2", made, calibration=["one", "two"])
    assert_type(small.gac_plan, gac.Plan)
    assert_type(gac.compress(small, "plan.json").gac_plan.budget.kept, float)
    assert_type(gac.heal(small, against="smollm2", text="self", minutes=5).gac_plan.healed[-1].after, float)
    gac.save(small, "small", max_shard_size="2GB", overwrite=True)
    again = gac.load(Path("small"), device="cpu", dtype=torch.bfloat16)
    assert_type(again.gac_plan.prediction.loss, float)
    verified = gac.verify("small")
    assert_type(verified, gac.Verified)
    assert_type(verified.digest, str)
    gac.export(again, "stock", merge=True)
    written = gac.export_gguf(again, "small.gguf", merge=True, overwrite=True)
    assert_type(written, gac.GgufFile)
    assert_type([one.moved for one in written.tensors], list[float])


def measure(model: PreTrainedModel, reference: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    perplexity = gac.perplexity(model, tokenizer, ["a document", "another"], windows=4, length=256)
    assert_type(perplexity, gac.Perplexity)
    assert_type(perplexity.value, float)
    divergence = gac.divergence(model, reference, tokenizer, batch=2)
    assert_type(divergence, gac.Divergence)
    assert_type(divergence.kl, float)
    found = gac.evaluate(["small", Path("other"), model], against="smollm2", also="wikitext2", tasks="arc_easy")
    assert_type(found, gac.Evaluation)
    assert_type([found.log_ratio(one) for one in found.models], list[float | None])


def choose(values: Iterable[float]) -> None:
    group = gac.Group("mlp", [0.0, *values], [[48], [32], [24]])
    solution = gac.knapsack([group], [40], names="params")
    assert_type(solution, gac.Solution)
    assert_type(solution.choice, tuple[int, ...])
    assert_type(solution.certificate.lower_bound, float)


def look(made: gac.Plan, table: gac.Profile) -> None:
    assert_type(gac.report("plan.json", "plan.html", against={"other": made}, frontier="frontier.json"), Path)
    sweep = table.rows_of("low_rank", {"m": 1024, "k": 4096, "n": 4096}, "r")
    cliffs = gac.find_cliffs(sweep)
    assert_type(cliffs.class_slowdown[8], float)
    assert_type(gac.explain("low_rank", 1023, table).summary, str)
    plots.save(plots.plan("plan.json"), "plan.pdf")
    plots.save(plots.figure_of_dims({"a": made, "b": "plan.json"}, "q_proj"), "dims.png")
    plots.save(plots.frontier("frontier.json", {"a": made}), "frontier.svg")
    plots.save(plots.latency(sweep, cliffs, dims=(8, 64)), "latency.png")
    plots.layer_time({"a": made}, "nvidia-h100-80gb-hbm3", layer=0)
    plots.prediction([plots.Outcome("a", 0.1, 0.12)])
    plots.save(gac.published_heads(ax=plots.heads(made)), "heads.png")
    plots.dims({"a": made}, "down_proj")
    plots.alignment(table)
    plots.speeds("speeds.json", title="a")
    assert gac.plots is plots
    plots.atlas(table)
    plots.figure_of_frontier("frontier.json")


def repair() -> None:
    own = gac.ShapeContract("own", steps=(32, 8), most_overhead=0.1)
    assert_type(own.becomes(107), int)
    found = gac.repair("palu", "padded", strategy=own, workloads="prefill:1x1024")
    assert_type(found.bytes_after, int)


def keep_tokens() -> None:
    plan = gac.allocate_tokens("smollm2", 0.5, press="snapkv", shares=(0.25, 0.5, 0.75))
    assert_type(plan, gac.TokenPlan)
    assert_type(plan.kept(0, 4096), int)
    assert_type(plan.cache_bytes(4096), tuple[int, int])
    gac.allocate_tokens("smollm2", 1, latency={"decode:1@4096": 0.7}, profile="nvidia-h200")
    plots.save(plots.figure_of_tokens({"a": plan, "b": "tokens.json"}), "tokens.png")
    plots.token_losses({"a": plan}, ax=plots.tokens({"a": plan}))
    gac.report(plan, "tokens.html", against={"b": "tokens.json"})
    gac.report("plan.json", tokens=plan)
    assert_type(gac.press(plan).compression_ratio, float)


def fail() -> str:
    try:
        gac.load("nowhere")
    except gac.GacError as error:
        return f"{error.given}, {error.expected}, {error.remedy}, {gac.__version__}"
    return ""
