"""What is given wrongly to a public function: one ``GacError`` that names it, and nothing is written or changed."""

import copy
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gac
from gac import plots
from gac.lab.mechanisms.explain import explain
from gac.profiling.cliffs import find_cliffs
from gac.testing import models
from tests.small_pipeline import Small

Row = tuple[str, dict[str, Any], str]
"""What is called, with which wrong arguments, and how the error begins."""

NAN = float("nan")
MODEL, PLAN, FRONTIER, TABLE, SWEEP, DRAWN = map(attrgetter, ("model", "plan", "frontier", "table", "sweep", "drawn"))
"""In a row: one of what ``own`` makes."""


@pytest.fixture(scope="module")
def own(prose: str, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("own")
    (folder / "prose.txt").write_text(prose, encoding="utf-8")
    small = Small(models.tiny_model(), models.tiny_tokenizer(), folder / "prose.txt")
    plan, table = small.allocate(0.7), gac.Profile.load("nvidia-h100-80gb-hbm3")
    compressed = small.compress(plan, model=copy.deepcopy(small.model))
    gac.save(compressed, folder / "saved", tokenizer=small.tokenizer)
    return SimpleNamespace(
        **vars(small),
        small=small,
        plan=plan,
        frontier=small.frontier(points=3),
        compressed=compressed,
        saved=folder / "saved",
        table=table,
        sweep=table.rows_of("low_rank", {"m": 1024, "k": 4096, "n": 4096}, "r"),
        drawn=plots.plan(plan),
    )


CALLS: dict[str, Callable[[Any], tuple[Callable[..., Any], dict[str, Any]]]] = {
    "allocate": lambda own: (gac.allocate, own.small.options | {"model": own.model}),
    "frontier": lambda own: (gac.frontier, own.small.options | {"model": own.model}),
    "frontier.plan": lambda own: (own.frontier.plan, {}),
    "recipe": lambda own: (gac.allocate, {"model": own.model, "tokenizer": own.tokenizer}),
    "compress": lambda own: (gac.compress, {"model": own.model, "plan": own.plan, "tokenizer": own.tokenizer}),
    "heal": lambda own: (gac.heal, {"model": own.compressed, "against": own.model, "tokenizer": own.tokenizer}),
    "GacConfig": lambda own: (gac.GacConfig, {}),
    "save": lambda own: (gac.save, {"model": own.compressed, "directory": "out"}),
    "load": lambda own: (gac.load, {"directory": own.saved}),
    "export": lambda own: (gac.export, {"model": own.compressed, "directory": "out", "merge": True}),
    "export_gguf": lambda own: (gac.export_gguf, {"model": own.compressed, "path": "out.gguf", "merge": True}),
    "perplexity": lambda own: (
        gac.perplexity,
        {"model": own.model, "tokenizer": own.tokenizer, "text": str(own.text), "length": 64},
    ),
    "divergence": lambda own: (
        gac.divergence,
        {"model": own.model, "reference": own.model, "tokenizer": own.tokenizer, "text": str(own.text), "length": 64},
    ),
    "evaluate": lambda own: (
        gac.evaluate,
        {"models": own.model, "tokenizer": own.tokenizer, "text": str(own.text), "length": 64},
    ),
    "report": lambda own: (gac.report, {"plan": own.plan, "output": "out.html"}),
    "repair": lambda own: (gac.repair, {"directory": own.saved, "output": "out"}),
    "ShapeContract": lambda own: (gac.ShapeContract, {"strategy": "own", "steps": (8,)}),
    "becomes": lambda own: (gac.ShapeContract("own", steps=(8,)).becomes, {}),
    "named": lambda own: (gac.ShapeContract.named, {}),
    "Documents": lambda own: (gac.Documents, {"texts": ["a text"]}),
    "Plan.load": lambda own: (gac.Plan.load, {}),
    "Plan.save": lambda own: (own.plan.save, {}),
    "Plan.compare": lambda own: (own.plan.compare, {}),
    "Recipe.of": lambda own: (gac.Recipe.of, {}),
    "Recipe": lambda own: (gac.Recipe, {}),
    "Profile.load": lambda own: (gac.Profile.load, {}),
    "Profile.rows_of": lambda own: (own.table.rows_of, {"operator": "linear", "axis": "n"}),
    "Profile.sweeps": lambda own: (own.table.sweeps, {}),
    "find_cliffs": lambda own: (find_cliffs, {}),
    "explain": lambda own: (explain, {"operator": "low_rank", "dim": 1023}),
    "plots.plan": lambda own: (plots.plan, {}),
    "plots.heads": lambda own: (plots.heads, {}),
    "plots.dims": lambda own: (plots.dims, {"plans": {"a": own.plan}, "weight": "q_proj"}),
    "plots.figure_of_dims": lambda own: (plots.figure_of_dims, {"plans": {"a": own.plan}}),
    "plots.layer_time": lambda own: (plots.layer_time, {"plans": {"a": own.plan}, "profile": own.table}),
    "plots.frontier": lambda own: (plots.frontier, {"frontier": own.frontier}),
    "plots.figure_of_frontier": lambda own: (plots.figure_of_frontier, {"frontier": own.frontier}),
    "plots.latency": lambda own: (plots.latency, {"sweep": own.sweep}),
    "plots.alignment": lambda own: (plots.alignment, {}),
    "plots.atlas": lambda own: (plots.atlas, {}),
    "plots.prediction": lambda own: (plots.prediction, {}),
    "plots.save": lambda own: (plots.save, {"drawn": own.drawn, "path": "out.png"}),
}
"""By the name in a row: what is called, with arguments that are right."""


def each(name: str, argument: str, wrong: Iterable[Any], message: str) -> list[Row]:
    """A row for each wrong value of an argument; it stands in the message where ``@`` does."""
    return [(name, {argument: value}, message.replace("@", repr(value))) for value in wrong]


NO_NUMBER = "; expected a number or None. Correct it."
NO_COUNT = "; expected a whole number, 1 to 1,000,000,000,000 or None. Correct it."
NO_PATH = "; expected a string or a path. Correct it."
NO_PLAN = "; expected a Plan, a string or a path. Correct it."
NO_PLANS = "; expected a mapping from a string to a Plan, a string or a path"
EITHER_KIND = "a Plan, a TokenPlan, a string or a path"
PLANS_OF_EITHER_KIND = f"; expected a mapping from a string to {EITHER_KIND}"
NO_TABLE = "; expected a Profile, a string or a path"
NO_MODEL = "; expected a PreTrainedModel"
NO_TOKENIZER = "; expected a PreTrainedTokenizerBase"

ROWS: list[Row] = [
    *each("allocate", "budget", (True, "0.8", [0.8], 1j), f"allocate(budget=@){NO_NUMBER}"),
    ("allocate", {"budget": np.array([0.8, 0.7])}, f"allocate(budget=array([0.8, 0.7])){NO_NUMBER}"),
    ("allocate", {"budget": torch.tensor([0.5])}, f"allocate(budget=tensor([0.5000])){NO_NUMBER}"),
    *each("allocate", "budget", (NAN, 0, 1.1), "limits.params=@; expected a number above 0"),
    *each("allocate", "model", (None, 3), f"allocate(model=@){NO_MODEL}, a string or a path"),
    ("allocate", {"model": ""}, "model '': no such directory; "),
    ("allocate", {"model": torch.nn.ReLU()}, f"allocate(model=ReLU()){NO_MODEL}"),
    ("allocate", {"tokenizer": 3}, f"allocate(tokenizer=3){NO_TOKENIZER}, a string, a path or None"),
    *(
        ("allocate", {"calibration": wrong}, f"a {type(wrong).__name__} as calibration text; expected a name, a path")
        for wrong in (None, 3)
    ),
    ("allocate", {"calibration": [3]}, "document 0 of type int; expected an iterable of strings, each a document"),
    ("allocate", {"profile": 3}, f"load(path_or_name=3){NO_PATH}"),
    ("allocate", {"profile": PLAN}, f"load(path_or_name of type Plan){NO_PATH}"),
    ("allocate", {"check": 3}, "allocate(check=3); expected a string, a Documents, several (each a string) or None"),
    ("allocate", {"verify": "yes"}, "allocate(verify='yes'); expected True or False"),
    *each("allocate", "seed", (-1, 1.5, None, True), "measure.seed=@; expected a whole number, 0 or more"),
    ("allocate", {"rule": None}, "a NoneType as a rule, which lacks name; expected an instance of a subclass"),
    ("allocate", {"rule": "uniform:down0"}, "rule uniform:down0; expected a way to round"),
    ("allocate", {"method": None}, "a NoneType as a method, which lacks name; "),
    *each("allocate", "refit", (False, 3, ["none"], {}), "refit=@; expected one of none, residual, update"),
    ("allocate", {"forms": "low_rnk"}, "form 'low_rnk' is unknown; "),
    ("allocate", {"forms": 3}, "a int as a form, which lacks name; "),
    ("allocate", {"forms": None}, "a NoneType as a form, which lacks name; "),
    *(
        ("allocate", {"workloads": wrong}, f"workload '{wrong}'; expected prefill:BxS or decode:B@C")
        for wrong in (3, None, "prefill")
    ),
    ("allocate", {"latency": {3: 0.9}}, "workload '3'; expected prefill:BxS"),
    ("allocate", {"latency": [0.9]}, "limits.latency.prefill:1x1024=[0.9]; expected a number above 0"),
    *each("allocate", "slack", (-0.1, NAN), "slack=@; expected a number from 0 to 1"),
    ("allocate", {"bugdet": 0.8}, "the option 'bugdet'; expected one of budget, "),
    ("recipe", {"recipe": 3}, "allocate(recipe=3); expected a Recipe, a string, a path or None"),
    ("recipe", {"recipe": PLAN}, "allocate(recipe of type Plan); expected a Recipe"),
    ("recipe", {"recipe": "none.json"}, "recipe none.json cannot be read: No such file"),
    ("frontier", {"points": 1}, "1 points; expected a whole number, 2 or more"),
    *each("frontier", "points", (2.0, "5", True), "frontier(points=@); expected a whole"),
    ("frontier", {"limit": None}, "frontier(limit=None); expected a string"),
    ("frontier", {"model": 3, "limit": "prefill:1x1024"}, f"frontier(model=3){NO_MODEL}"),
    ("frontier", {"recipe": 3}, "frontier(recipe=3); expected a Recipe"),
    *each("frontier.plan", "index", (99, -99), "point @ of a frontier; expected one from 0 to "),
    *each("frontier.plan", "index", ("1", 1.0, None, True), "plan(index=@); expected a whole"),
    *each("heal", "minutes", (True, "5", [5]), f"heal(minutes=@){NO_NUMBER}"),
    *each("heal", "tokens", (0, 0.5, "many"), f"heal(tokens=@){NO_COUNT}"),
    *each("heal", "against", (None, 3), f"heal(against=@){NO_MODEL}, a string or a path"),
    ("heal", {"text": 3}, "heal(text=3); expected a string, a Documents, several"),
    ("heal", {"minutes": NAN}, "minutes=nan; expected minutes above 0"),
    ("heal", {"blocks": 2}, "blocks=2; expected the share of the work"),
    *each("compress", "plan", (3, None, {}), f"compress(plan=@){NO_PLAN}"),
    ("compress", {"plan": FRONTIER}, f"compress(plan of type Frontier){NO_PLAN}"),
    ("compress", {"plan": "none.json"}, "plan none.json cannot be read: No such file or directory; "),
    ("compress", {"plan": Path(".")}, "plan . cannot be read: Is a directory; "),
    ("compress", {"model": 3}, f"compress(model=3){NO_MODEL}"),
    ("compress", {"calibration": []}, "no document; expected an iterable of strings"),
    ("GacConfig", {"plan": 3}, "a int as a plan; expected a Plan, or the path of one. Pass one of these."),
    ("save", {"model": None}, f"save(model=None){NO_MODEL}"),
    ("save", {"model": MODEL}, "a LlamaForCausalLM without a plan; "),
    ("save", {"directory": 3}, f"save(directory=3){NO_PATH}"),
    ("save", {"tokenizer": "smollm2"}, f"save(tokenizer='smollm2'){NO_TOKENIZER} or None"),
    *each(
        "save",
        "max_shard_size",
        ("lots", "5", "0GB", "-5GB", "5GB\n"),
        "max_shard_size=@; expected bytes, or a size in KB, MB, GB or TB.",
    ),
    *each(
        "save",
        "max_shard_size",
        (-1, 0, None, True, 1.5),
        "save(max_shard_size=@); expected a whole number, 1 to 1,000,000,000,000 or a string",
    ),
    ("load", {"directory": 3}, f"load(directory=3){NO_PATH}"),
    ("load", {"directory": "none"}, "none has no config.json with a key gac; "),
    *each("load", "device", ("gpu9", "cuda:99", "cuda:-2"), "device @; expected cpu, or one of the "),
    ("load", {"device": 3.5}, "load(device=3.5); expected a device, a string or None"),
    ("load", {"dtype": "bfloat16"}, "load(dtype='bfloat16'); expected a dtype or None"),
    ("export", {"model": 3}, f"export(model=3){NO_MODEL}, a string or a path"),
    ("export", {"model": MODEL}, "a LlamaForCausalLM without a plan; "),
    ("export_gguf", {"model": MODEL}, "a LlamaForCausalLM without a plan; "),
    ("export", {"tokenizer": 3}, f"export(tokenizer=3){NO_TOKENIZER} or None"),
    ("export_gguf", {"tokenizer": 3}, f"export_gguf(tokenizer=3){NO_TOKENIZER} or None"),
    ("perplexity", {"model": "smollm2"}, f"perplexity(model='smollm2'){NO_MODEL}. Correct it."),
    *each("perplexity", "tokenizer", (3, None), f"perplexity(tokenizer=@){NO_TOKENIZER}."),
    *each("perplexity", "text", (3, None), "perplexity(text=@); expected a string, a Docum"),
    *(
        ("perplexity", {name: wrong}, f"perplexity({name}={wrong!r}){NO_COUNT}")
        for name in ("windows", "length")
        for wrong in (-1, 0, 1.5, "2", True)
    ),
    *each(
        "perplexity",
        "batch",
        (-1, 0, 1.5, "2", None),
        "perplexity(batch=@); expected a whole number, 1 to 1,000,000,000,000. Correct it.",
    ),
    ("perplexity", {"bos": "yes"}, "perplexity(bos='yes'); expected True or False or None"),
    ("perplexity", {"text": {"a": 1}}, "perplexity(text={'a': 1}); expected a string, a Documents or several"),
    ("divergence", {"reference": 3}, f"divergence(reference=3){NO_MODEL}"),
    ("divergence", {"batch": 0}, "divergence(batch=0); expected a whole number, 1 to 1,000,000,000,000"),
    *each("evaluate", "models", (None, 3, [3]), f"evaluate(models=@){NO_MODEL}"),
    ("evaluate", {"models": []}, "no model; expected at least one"),
    ("evaluate", {"text": 3}, "evaluate(text=3); expected a string"),
    ("evaluate", {"also": 3}, "evaluate(also=3); expected a string"),
    ("evaluate", {"text": None}, "no text and no tasks; "),
    ("evaluate", {"tasks": [3]}, "evaluate(tasks=[3]); expected a string or several (each a string)"),
    ("evaluate", {"limit": 5}, "num_fewshot=None and limit=5 without tasks; "),
    (
        "evaluate",
        {"tasks": "none.yaml", "limit": "5"},
        "evaluate(limit='5'); expected a whole number, 1 to 1,000,000,000,000 or None",
    ),
    ("report", {"plan": FRONTIER}, f"report(plan of type Frontier); expected {EITHER_KIND}"),
    ("report", {"plan": "none.json"}, "plan none.json cannot be read"),
    ("report", {"output": None}, f"report(output=None){NO_PATH}"),
    (
        "report",
        {"against": PLAN},
        f"report(against of type Plan){PLANS_OF_EITHER_KIND} or None",
    ),
    ("report", {"against": {"a": 3}}, f"report(against={{'a': 3}}){PLANS_OF_EITHER_KIND}"),
    ("report", {"frontier": PLAN}, "report(frontier of type Plan); expected a Frontier, a string, a path or None"),
    ("report", {"profile": "none"}, "profile 'none' is neither a file nor a known name; "),
    ("report", {"name": 3}, "report(name=3); expected a string"),
    ("repair", {"directory": 3}, f"repair(directory=3){NO_PATH}"),
    ("repair", {"strategy": None}, "repair(strategy=None); expected a string or a ShapeContract"),
    *each("repair", "max_overhead", (True, "0.1"), f"repair(max_overhead=@){NO_NUMBER}"),
    ("repair", {"max_overhead": NAN}, "a maximum overhead of nan; "),
    ("repair", {"workloads": [3]}, "repair(workloads=[3]); expected a string or several (each a string)"),
    ("repair", {"workloads": "prefill:1x"}, "workload 'prefill:1x'; "),
    *each("ShapeContract", "steps", (8, ("8",), (8.5,), (True,)), "ShapeContract(steps=@); "),
    ("ShapeContract", {"steps": ()}, "a contract with steps () and dims (); "),
    ("ShapeContract", {"most_overhead": "x"}, f"ShapeContract(most_overhead='x'){NO_NUMBER}"),
    *each("becomes", "dim", ("3", 0, -3), "becomes(dim=@); expected a whole number, 1 to 1,000,000,000,000"),
    ("named", {"strategy": ["minimal"]}, "named(strategy=['minimal']); expected a string"),
    ("Documents", {"texts": None}, "a NoneType as documents; expected an iterable of strings, each a document"),
    ("Documents", {"texts": 3}, "a int as documents; expected an iterable of strings, each a document"),
    *each("Documents", "windows", (-1, 0, True, "2"), "Documents(windows=@); expected a"),
    ("Documents", {"length": 6.5}, "Documents(length=6.5); expected a whole number, 1 to 1,000,000,000,000"),
    ("Documents", {"separator": 3}, "Documents(separator=3); expected a string"),
    *each("Plan.load", "path", (3, None, b"plan.json"), f"load(path=@){NO_PATH}"),
    ("Plan.save", {"path": None}, f"save(path=None){NO_PATH}"),
    ("Plan.compare", {"other": FRONTIER}, f"compare(other of type Frontier){NO_PLAN}"),
    ("Recipe.of", {"budget": "0.8"}, "limits.params='0.8'; expected a number above 0"),
    ("Recipe", {"rule": None}, "rule=None; expected the name of a rule"),
    ("Profile.load", {"path_or_name": None}, f"load(path_or_name=None){NO_PATH}"),
    ("Profile.rows_of", {"fixed": [1024]}, "rows_of(fixed=[1024]); expected a mapping from a string to a whole number"),
    *each("Profile.sweeps", "least", ("8", 0), "sweeps(least=@); expected a whole"),
    ("find_cliffs", {"sweep": TABLE}, "find_cliffs(sweep of type Profile); expected a Sweep"),
    *each("explain", "dim", ("1023", 1.5), "explain(dim=@); expected a whole number"),
    ("explain", {"profile": 3}, "explain(profile=3); expected a Profile, a string, a path or None"),
    ("plots.plan", {"plan": "none.json"}, "plan none.json cannot be read"),
    ("plots.plan", {"plan": 3}, f"plan(plan=3){NO_PLAN}"),
    ("plots.heads", {"plan": FRONTIER}, f"heads(plan of type Frontier){NO_PLAN}"),
    ("plots.dims", {"plans": PLAN}, f"dims(plans of type Plan){NO_PLANS}"),
    ("plots.dims", {"plans": {}}, "0 plans in one figure; "),
    ("plots.figure_of_dims", {"weights": 3}, "figure_of_dims(weights=3); expected a string or several"),
    ("plots.layer_time", {"profile": 3}, f"layer_time(profile=3){NO_TABLE}"),
    ("plots.frontier", {"frontier": PLAN}, "plot_frontier(frontier of type Plan); expected a Frontier, a string or a"),
    ("plots.frontier", {"plans": PLAN}, f"plot_frontier(plans of type Plan){NO_PLANS}"),
    ("plots.figure_of_frontier", {"plans": 3}, f"figure_of_frontier(plans=3){NO_PLANS}"),
    ("plots.latency", {"sweep": TABLE}, "latency(sweep of type Profile); expected a Sweep"),
    ("plots.latency", {"dims": 3}, "latency(dims=3); expected several (each a whole number) or None"),
    ("plots.latency", {"dims": [8, 16, 32]}, "latency(dims=[8, 16, 32]); expected several (each a whole"),
    ("plots.latency", {"dims": (5000, 6000)}, "dims from 5000 to 6000 of low_rank bf16 m=1024 k=4096 n=4096, r; "),
    ("plots.alignment", {"profile": 3}, f"alignment(profile=3){NO_TABLE}"),
    ("plots.atlas", {"profile": 3}, f"atlas(profile=3){NO_TABLE}"),
    ("plots.prediction", {"outcomes": [3]}, "prediction(outcomes=[3]); expected several (each an Outcome)"),
    ("plots.save", {"drawn": 3}, "a int to save; expected a figure, or axes of one"),
    ("plots.save", {"path": 3}, f"save(path=3){NO_PATH}"),
]


@pytest.mark.parametrize(
    ("name", "wrong", "message"), ROWS, ids=[f"{name}-{message[:60]}" for name, _, message in ROWS]
)
def test_what_is_wrong_is_named(
    name: str,
    wrong: dict[str, Any],
    message: str,
    own: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    call, right = CALLS[name](own)
    given = {key: value(own) if isinstance(value, attrgetter) else value for key, value in wrong.items()}
    with pytest.raises(gac.GacError) as refused:
        call(**right | given)
    assert str(refused.value).startswith(message)
    assert not list(tmp_path.iterdir())


def test_one_name_is_a_list_of_one(own: SimpleNamespace) -> None:
    one = own.small.allocate(0.7, forms="low_rank", schemes="bf16", workloads="prefill:1x64")
    assert one == own.small.allocate(0.7, forms=["low_rank"], schemes=["bf16"], workloads=["prefill:1x64"])
    assert gac.knapsack([gac.Group("a", [1.0], [[1]])], [2], names="params").used == (1,)
    measured = gac.evaluate(own.model, tokenizer=own.tokenizer, text=None, also=str(own.text), length=64, windows=2)
    assert len(measured.models[0].texts) == 1
    assert len(plots.figure_of_dims({"a": own.plan}, "q_proj").axes) == 1


def test_a_plan_and_a_frontier_may_be_paths(
    own: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own.plan.save("plan.json")
    own.frontier.save("frontier.json")
    own.plan.recipe.save("recipe.json")
    for path in ("plan.json", Path("plan.json")):
        assert own.small.compress(path, model=copy.deepcopy(own.model)).gac_plan == own.plan
        assert own.plan.compare(path).differences == ()
        plots.plan(path)
    options = {"against": {"other": "plan.json"}, "frontier": "frontier.json"}
    page = gac.report("plan.json", "a.html", **options).read_bytes()  # type: ignore[arg-type]
    given = {"against": {"other": own.plan}, "frontier": own.frontier}
    assert page == gac.report(own.plan, "b.html", **given).read_bytes()  # type: ignore[arg-type]
    assert plots.figure_of_frontier("frontier.json", {"a": "plan.json"}).axes
    again = gac.allocate(own.model, recipe="recipe.json", tokenizer=own.tokenizer, progress=False)
    assert again == own.plan
    assert gac.GacConfig("plan.json").plan == own.plan
