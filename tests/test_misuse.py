"""What is given wrongly to a public function: one ``GacError`` that names it, and nothing is written or changed."""

import copy
import inspect
import re
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
from gac.testing import models
from gac_extensions.lab.cliffs import find_cliffs
from gac_extensions.lab.mechanisms.explain import explain
from tests.small_pipeline import Small

Row = tuple[str, dict[str, Any], str]
"""What is called, with which wrong arguments, and how the error begins."""

NAN = float("nan")
MODEL, PLAN, FRONTIER = map(attrgetter, ("model", "plan", "frontier"))
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
        reading={"tokenizer": small.tokenizer, "text": str(small.text), "length": 64},
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
    "perplexity": lambda own: (gac.perplexity, own.reading | {"model": own.model}),
    "divergence": lambda own: (gac.divergence, own.reading | {"model": own.model, "reference": own.model}),
    "evaluate": lambda own: (gac.evaluate, own.reading | {"models": own.model}),
    "allocate_tokens": lambda own: (gac.allocate_tokens, {"model": own.model}),
    "report": lambda own: (gac.report, {"plan": own.plan, "output": "out.html"}),
    "repair": lambda own: (gac.repair, {"directory": own.saved, "output": "out"}),
    "ShapeContract": lambda own: (gac.ShapeContract, {"strategy": "own", "steps": (8,)}),
    "becomes": lambda own: (gac.ShapeContract("own", steps=(8,)).becomes, {"dim": 8}),
    "named": lambda own: (gac.ShapeContract.named, {}),
    "Documents": lambda own: (gac.Documents, {"texts": ["a text"]}),
    "Plan.load": lambda own: (gac.Plan.load, {}),
    "Plan.save": lambda own: (own.plan.save, {}),
    "Plan.compare": lambda own: (own.plan.compare, {}),
    "Recipe.of": lambda own: (gac.Recipe.of, {}),
    "Recipe": lambda own: (gac.Recipe, {}),
    "Profile.load": lambda own: (gac.Profile.load, {}),
    "Profile.rows_of": lambda own: (own.table.rows_of, {"operator": "linear", "fixed": {}, "axis": "n"}),
    "Profile.sweeps": lambda own: (own.table.sweeps, {}),
    "find_cliffs": lambda own: (find_cliffs, {}),
    "explain": lambda own: (explain, {"operator": "low_rank", "dim": 1023}),
    "plots.plan": lambda own: (plots.plan, {"plan": own.plan}),
    "plots.heads": lambda own: (plots.heads, {"plan": own.plan}),
    "plots.dims": lambda own: (plots.dims, {"plans": {"a": own.plan}, "weight": "q_proj"}),
    "plots.figure_of_dims": lambda own: (plots.figure_of_dims, {"plans": {"a": own.plan}}),
    "plots.layer_time": lambda own: (plots.layer_time, {"plans": {"a": own.plan}, "profile": own.table}),
    "plots.frontier": lambda own: (plots.frontier, {"frontier": own.frontier}),
    "plots.figure_of_frontier": lambda own: (plots.figure_of_frontier, {"frontier": own.frontier}),
    "plots.latency": lambda own: (plots.latency, {"sweep": own.sweep}),
    "plots.alignment": lambda own: (plots.alignment, {"profile": own.table}),
    "plots.atlas": lambda own: (plots.atlas, {}),
    "plots.prediction": lambda own: (plots.prediction, {"outcomes": []}),
    "plots.save": lambda own: (plots.save, {"drawn": own.drawn, "path": "out.png"}),
}
"""By the name in a row: what is called, with arguments that are right."""


def each(name: str, argument: str, wrong: Iterable[Any], message: str) -> list[Row]:
    """A row for each wrong value of an argument; it stands in the message where ``@`` does."""
    return [(name, {argument: value}, message.replace("@", repr(value))) for value in wrong]


NO_COUNT = "; expected a whole number, 1 to 1,000,000,000,000"
NO_PLAN = "; expected a Plan, a string or a path. Correct it."

ROWS: list[Row] = [
    *each("allocate", "budget", (True, [0.8]), "allocate(budget=@); expected a number, a string or None. Correct it."),
    ("allocate", {"budget": "0.8"}, "limits.params='0.8'; expected a number above 0 and at most 1, or a size of the"),
    ("allocate", {"budget": np.array([0.8, 0.7])}, "allocate(budget=array([0.8, 0.7])); expected a number, a string"),
    ("allocate", {"budget": torch.tensor([0.5])}, "allocate(budget=tensor([0.5000])); expected a number, a string or"),
    ("allocate", {"model": ""}, "model '': no such directory; "),
    ("allocate", {"calibration": [3]}, "document 0 of type int; expected an iterable of strings, each a document"),
    ("allocate", {"rule": None}, "a NoneType as a rule, which lacks name; expected an instance of a subclass"),
    ("allocate", {"rule": "uniform:down0"}, "rule uniform:down0; expected a way to round"),
    ("allocate", {"refit": ["none"]}, "refit=['none']; expected one of none, residual, update"),
    ("allocate", {"latency": {3: 0.9}}, "workload '3'; expected prefill:BxS"),
    ("allocate", {"latency": [0.9]}, "limits.latency.prefill:1x1024=[0.9]; expected a number above 0"),
    *each("allocate", "slack", (-0.1, NAN), "slack=@; expected a number from 0 to 1"),
    ("allocate", {"kv_cache": 0.75, "rule": "uniform"}, "rule uniform with a limit of kv_cache; "),
    ("allocate", {"method": "palu", "forms": "narrow"}, "method palu with forms narrow; expected its own, latent. "),
    ("allocate", {"method": "palu:2", "kv_cache": 0.5}, "method palu:2 with budget 0.8 and a KV-cache limit of 0.5; "),
    ("allocate", {"forms": "latent:1", "latency": 0.9}, "a limit of latency, or loss for speed, with form latent:1; "),
    ("recipe", {"recipe": "none.json"}, "recipe none.json cannot be read: No such file"),
    *each("frontier.plan", "index", (99, -99), "point @ of a frontier; expected one from 0 to "),
    ("heal", {"tokens": "many"}, f"heal(tokens='many'){NO_COUNT} or None. Correct it."),
    *each("heal", "minutes", (NAN, 0, -1, 10**40), "minutes=@; expected minutes above 0, a year at most"),
    ("heal", {"blocks": 2}, "blocks=2; expected the share of the work"),
    ("compress", {"plan": FRONTIER}, f"compress(plan of type Frontier){NO_PLAN}"),
    ("compress", {"plan": "none.json"}, "plan none.json cannot be read: No such file or directory; "),
    ("compress", {"plan": Path(".")}, "plan . cannot be read: Is a directory; "),
    ("GacConfig", {"plan": "none.json"}, "plan none.json cannot be read: No such file or directory; "),
    *each("save", "max_shard_size", ("lots", "0GB", "5GB\n"), "max_shard_size=@; expected bytes, or a size in KB"),
    *each("save", "max_shard_size", (-1, True, 1.5), f"save(max_shard_size=@){NO_COUNT} or a string"),
    *each("load", "device", ("gpu9", "cuda:99", "cuda:-2"), "device @; expected cpu, or one of the "),
    ("export_gguf", {"model": MODEL}, "a LlamaForCausalLM without a plan; "),
    *each("perplexity", "windows", (0, "2"), f"perplexity(windows=@){NO_COUNT} or None. Correct it."),
    ("perplexity", {"batch": None}, f"perplexity(batch=None){NO_COUNT}. Correct it."),
    ("perplexity", {"text": {"a": 1}}, "perplexity(text={'a': 1}); expected a string, a Documents or several"),
    *each("evaluate", "num_fewshot", (-1, 10**40, True, 1.5), "evaluate(num_fewshot=@); expected a whole number"),
    ("evaluate", {"tasks": [3]}, "evaluate(tasks=[3]); expected a string or several (each a string)"),
    ("evaluate", {"limit": 5}, "num_fewshot=None and limit=5 without tasks; "),
    ("report", {"plan": "none.json"}, "plan none.json cannot be read"),
    ("report", {"against": {"a": 3}}, "report(against={'a': 3}); expected a mapping from a string to a Plan"),
    ("report", {"profile": "none"}, "profile 'none' is neither a file nor a known name; "),
    ("repair", {"max_overhead": NAN}, "a maximum overhead of nan; "),
    ("repair", {"workloads": "prefill:1x"}, "workload 'prefill:1x'; "),
    *each("ShapeContract", "steps", (8, ("8",), (8.5,), (True,)), "ShapeContract(steps=@); "),
    ("ShapeContract", {"steps": ()}, "a contract with steps () and dims (); "),
    *each("becomes", "dim", ("3", 0, -3), f"becomes(dim=@){NO_COUNT}"),
    ("Profile.rows_of", {"fixed": [1024]}, "rows_of(fixed=[1024]); expected a mapping from a string to a whole number"),
    ("plots.dims", {"plans": {}}, "0 plans in one figure; "),
    ("plots.latency", {"dims": [8, 16, 32]}, "latency(dims=[8, 16, 32]); expected several (each a whole"),
    ("plots.latency", {"dims": (5000, 6000)}, "dims from 5000 to 6000 of low_rank bf16 m=1024 k=4096 n=4096, r; "),
    ("plots.prediction", {"outcomes": [3]}, "prediction(outcomes=[3]); expected several (each an Outcome)"),
]

ANYTHING = {
    "GacConfig": {"calibration", "tokenizer"},
    "frontier": {"recipe"},
    "recipe": {"budget"},
    "allocate_tokens": {"model", "press", "calibration", "profile", "tokenizer"},
}
"""Arguments that are checked where they are used, or that do not go with the right ones."""


@pytest.mark.parametrize("name", CALLS)
def test_wrong_types_are_named(name: str, own: SimpleNamespace, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    call, right = CALLS[name](own)
    parameters = inspect.signature(call).parameters.values()
    named = {each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)} - {"ax"}
    for argument in sorted(named - ANYTHING.get(name, set())):
        with pytest.raises(gac.GacError, match=r"^[\w.]*\(?\w+=<object|object as |a object to save"):
            call(**right | {argument: object()})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "wrong", "message"), ROWS, ids=[f"{name}-{message[:60]}" for name, _, message in ROWS]
)
def test_wrong_values(name: str, wrong: Any, message: str, own: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    call, right = CALLS[name](own)
    values = {key: value(own) if isinstance(value, attrgetter) else value for key, value in wrong.items()}
    with pytest.raises(gac.GacError, match=f"^{re.escape(message)}"):
        call(**right | values)
    assert not list(tmp_path.iterdir())


COUNTS = (
    "Documents.windows Documents.length evaluate.windows evaluate.length evaluate.batch evaluate.limit heal.tokens "
    "allocate_tokens.following allocate_tokens.step frontier.points Recipe.of.shots"
)


@pytest.mark.parametrize("name", COUNTS.split())
def test_impossible_counts(name: str, own: SimpleNamespace) -> None:
    function, _, option = name.rpartition(".")
    call, right = CALLS[function](own)
    for count in (0, -1, 10**40, True, 1.5, NAN, float("inf"), "1"):
        with pytest.raises(gac.GacError, match=rf"{option}={count!r}|{count} {option}"):
            call(**right | {option: count})


@pytest.mark.parametrize("option", ["seed", "align", "tensor_parallel"])
def test_numbers_that_no_plan_file_holds(option: str) -> None:
    gac.Recipe.of(0.8, **{option: 2**62})
    for number in (-1, 2**62 + 1, 10**40):
        with pytest.raises(gac.GacError, match=f"{option}={number}"):
            gac.Recipe.of(0.8, **{option: number})


def test_one_name_is_a_list_of_one(own: SimpleNamespace) -> None:
    one = own.small.allocate(0.7, forms="low_rank", schemes="bf16", workloads="prefill:1x64")
    assert one == own.small.allocate(0.7, forms=["low_rank"], schemes=["bf16"], workloads=["prefill:1x64"])
    assert gac.knapsack([gac.Group("a", [1.0], [[1]])], [2], names="params").used == (1,)
    measured = gac.evaluate(own.model, tokenizer=own.tokenizer, text=None, also=str(own.text), length=64, windows=2)
    assert len(measured.models[0].texts) == 1
    assert len(plots.figure_of_dims({"a": own.plan}, "q_proj").axes) == 1


def test_plans_and_frontiers_may_be_paths(own: SimpleNamespace, tmp_path: Path, monkeypatch: Any) -> None:
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
