"""The command line on a tiny model: every command, its JSON, its exit status and its words."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import gac
from gac.cli import main
from gac.cli.plot import plot
from gac.plan.plan import Plan
from gac.plan.recipe import KEYWORDS
from tests.cli.commands import answer, refused, run

H100 = "nvidia-h100-80gb-hbm3"

EVAL = ("--windows", 2, "--length", 64)


@pytest.fixture
def model(directory: Path) -> Path:
    return directory


@pytest.fixture
def plan(model: Path, text_file: Path, tmp_path: Path) -> Path:
    result = run("allocate", model, "--calibration", f"{text_file}:4x64", "-o", tmp_path / "plan.json")
    assert result.exit_code == 0, result.output
    return tmp_path / "plan.json"


@pytest.fixture
def checkpoint(model: Path, plan: Path, tmp_path: Path) -> Path:
    result = run("compress", model, "--plan", plan, "-o", tmp_path / "small")
    assert result.exit_code == 0, result.output
    return tmp_path / "small"


@pytest.mark.parametrize("words", [*main.commands, *(f"plot {kind}" for kind in plot.commands)])
def test_every_command_has_help_and_is_listed(words: str) -> None:
    *group, name = words.split()
    assert f"\n  {name} " in run(*group, "--help").stdout
    result = run(*group, name, "--help")
    assert (result.exit_code, "--json" in result.stdout) == (0, name != "plot")


def test_the_version() -> None:
    assert run("--version").stdout == f"gac, version {gac.__version__} ({gac.__distribution__})\n"


def test_allocate_writes_a_plan_and_answers_with_it(model: Path, text_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "plan.json"
    document = answer("allocate", model, "--budget", 0.7, "--calibration", f"{text_file}:4x64", "-o", target)
    plan = Plan.load(target)
    assert document["path"] == str(target)
    assert document["limits"][0]["used"] == plan.budget.used <= document["limits"][0]["limit"]
    assert document["prediction"]["loss"] == plan.prediction.loss
    assert document["aligned_fraction"] == 1.0


OPTIONS: dict[str, dict[str, Any]] = {
    "--budget 0.7": {"budget": 0.7},
    "--memory 0.5": {"memory": 0.5},
    "--latency 0.9": {"latency": 0.9},
    "--latency decode:1@1024=0.8": {"latency": {"decode:1@1024": 0.8}},
    "--latency any": {"latency": "any"},
    "--kv-cache 0.5 --form latent:1": {"kv_cache": 0.5, "forms": ["latent:1"]},
    "--slack 0.01": {"slack": 0.01},
    "--rule uniform:down8": {"rule": "uniform:down8"},
    "--method svd": {"method": "svd"},
    "--calibration TEXT:2x64 --calibration TEXT:4x32": {"calibration": ["TEXT:2x64", "TEXT:4x32"]},
    "--seed 3": {"seed": 3},
    "--shots 2": {"shots": 2},
    "--bos": {"bos": True},
    "--form low_rank --form skip": {"forms": ["low_rank", "skip"]},
    "--scheme bf16 --scheme w4a16": {"schemes": ["bf16", "w4a16"]},
    "--no-align": {"align": False},
    "--align-to 16": {"align": 16},
    "--no-rotate": {"rotate": False},
    "--head w8a16": {"head": "w8a16"},
    f"--profile {H100}": {"profile": H100},
    "--workload decode:2@64": {"workloads": ["decode:2@64"]},
    "--no-fuse": {"fuse": False},
    "--tensor-parallel 2": {"tensor_parallel": 2},
    "--refit update": {"refit": "update"},
}
CHOSEN = ("--budget", "--memory", "--latency", "--kv-cache", "--slack", "--rule")
"""Options of allocate alone."""


@pytest.mark.parametrize("words", OPTIONS)
def test_an_option_is_a_field_of_the_recipe(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[gac.Recipe] = []
    for command in ("allocate",) if words.startswith(CHOSEN) else ("allocate", "frontier"):
        monkeypatch.setattr(f"gac.api.{command}", lambda *_, recipe, **__: requests.append(recipe))
        run(command, "smollm2", *words.split())
        assert requests.pop() == gac.Recipe.of(**OPTIONS[words])
    assert not requests


def test_every_option_of_a_recipe_is_in_the_table() -> None:
    named = {word for words in OPTIONS for word in words.split() if word.startswith("--")}
    rows = [row for row in main.commands["allocate"].params if row.name in (*KEYWORDS, "budget", "step")]
    assert all({*row.opts, *row.secondary_opts} & named for row in rows if row.name != "decode_kernel")
    assert len(rows) > 20


def test_a_recipe_file_replaces_the_options(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = gac.Recipe.of(0.7, method="svd")
    recipe.save(tmp_path / "recipe.json")
    requests: list[gac.Recipe] = []
    monkeypatch.setattr("gac.api.allocate", lambda *_, recipe, **__: requests.append(recipe))
    words = ("allocate", model, "--recipe", tmp_path / "recipe.json", "--tokenizer", model)
    run(*words)
    assert requests == [recipe]
    result = run(*words, "--seed", 1)
    assert (result.exit_code, "--seed goes without --recipe" in result.stderr) == (2, True)


def test_allocate_notes_its_cost_and_shows_the_plan(model: Path, text_file: Path, tmp_path: Path) -> None:
    words = ("--budget", 1, "--kv-cache", 0.5, "--form", "latent:1:int8", "--calibration", f"{text_file}:6x32")
    result = run("allocate", model, *words, "-o", tmp_path / "plan.json")
    notes = " ".join(result.stderr.split())
    assert f"calibration on 6 windows of 32 tokens of {text_file}" in notes
    assert "of statistics and factors in" in notes
    assert "form latent:1: the model is run up to 20 times on 32 held-out tokens" in notes
    assert "layer q k v o gate up down kept loss" in " ".join(result.stdout.split())
    assert "GAC plan for" in result.stdout


def test_several_texts_and_one_to_check(model: Path, text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("0123 + 456 = 579; " * 100, encoding="utf-8")
    texts = (f"{text_file}:4x64", f"{tmp_path / 'other.txt'}:2x64")
    (tmp_path / "like.txt").write_text("<a href='x'>y</a> " * 50, encoding="utf-8")
    options = ("--calibration", texts[0], "--calibration", texts[1], "--check", tmp_path / "like.txt")
    result = run("allocate", model, *options, "-o", tmp_path / "plan.json")
    assert result.exit_code == 0
    assert f"on 6 windows of 64 tokens of {text_file} (4) and {tmp_path / 'other.txt'} (2)" in result.stderr
    assert f"warning: {tmp_path / 'like.txt'} is unlike the calibration text" in result.stderr
    lengths = ("--calibration", texts[0], "--calibration", f"{tmp_path / 'other.txt'}:2x32")
    assert "windows of 32 and 64 tokens; expected one length" in refused("allocate", model, *lengths)


def test_nothing_is_written_over_a_directory_below_a_file_or_where_nothing_can_be(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    message = "Error: . is a directory; expected the path of a file. Name a file in it.\n"
    assert refused("eval", "m", "-o", ".") == message
    message = "file is a file; expected a path below a directory. Choose another path.\n"
    assert refused("allocate", "m", "-o", "file/a").endswith(message)

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("gac.cli.options.TemporaryFile", refuse)
    message = refused("allocate", model, "-o", tmp_path / "plan.json")
    assert f"nothing can be written to {tmp_path}: Permission denied; expected a writable path" in message


def test_an_interrupt_says_what_is_kept(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_arguments: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gac.api.allocate", stop)
    result = run("allocate", model, "-o", tmp_path / "plan.json")
    assert result.exit_code == 130
    assert "Interrupted. Progress is saved in GAC_HOME; rerun the command" in result.stderr


def test_compress_writes_a_checkpoint_that_opens(model: Path, plan: Path, tmp_path: Path) -> None:
    words = ("compress", model, "--plan", plan, "-o", tmp_path / "small")
    document = answer(*words)
    loaded = gac.load(tmp_path / "small")
    assert document["parameters"] == sum(parameter.numel() for parameter in loaded.parameters())
    assert document["parameters"] < document["dense_parameters"]
    assert (tmp_path / "small" / "tokenizer.json").is_file()
    assert "small holds a compressed checkpoint; expected a new or empty directory." in refused(*words)
    assert run(*words, "--overwrite").exit_code == 0


def test_eval_of_a_dense_model(model: Path, text_file: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    document = answer("eval", model, "--text", text_file, "--windows", 3, "--length", 64, "-o", report)
    assert json.loads(report.read_text()) == document
    assert set(document) == {"models"}
    [entry] = document["models"]
    assert entry["perplexity"]["tokens"] == 3 * 63
    assert set(entry) == {"name", "parameters", "dtype", "perplexity"}
    assert entry["perplexity"]["protocol"].endswith("BOS at the head of every window")
    [without] = answer("eval", model, "--text", text_file, "--windows", 3, "--length", 64, "--no-bos")["models"]
    assert without["perplexity"]["protocol"].endswith("no BOS")


def test_eval_shows_predictions_with_measurements(
    model: Path, checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("0123 + 456 = 579; " * 100, encoding="utf-8")
    arguments = ("eval", checkpoint, "--text", text_file, "--text", other, *EVAL, "--against", model)
    document = answer(*arguments, "-o", tmp_path / "report.json")
    assert run("plot", "prediction", tmp_path / "report.json", "-o", tmp_path / "figure.svg").exit_code == 0
    [entry], dense = document["models"], document["against"]
    assert [text["perplexity"]["text"] for text in (entry, *entry["also"])] == [str(text_file), str(other)]
    [also], [dense_also] = entry["also"], dense["also"]
    assert also["ratio"] == pytest.approx(also["perplexity"]["value"] / dense_also["perplexity"]["value"])
    assert set(also) == {"perplexity", "divergence", "ratio", "log_ratio", "predicted_perplexity"}
    assert set(dense_also) == {"perplexity"}
    assert entry["ratio"] == pytest.approx(entry["perplexity"]["value"] / dense["perplexity"]["value"])
    assert entry["predicted"] == entry["plan"]["prediction"]["loss"]
    assert entry["divergence"]["tokens"] == 2 * 63
    counted = entry["plan"]
    assert counted["model_bytes"] == {"used": 2 * entry["parameters"], "total": 2 * dense["parameters"]}
    assert counted["bits"] == 8 * counted["bytes"]["used"] / counted["limits"][0]["total"]
    shown = " ".join(run(*arguments).stdout.split())
    for words in (
        "on other.txt",
        "predicted by its plan",
        "targeted ones, with scales and zero points",
        "weights bits model of the model KV cache schemes",
    ):
        assert words in shown


def test_eval_against_another_model_predicts_nothing(checkpoint: Path, text_file: Path) -> None:
    result = run("eval", checkpoint, "--text", text_file, *EVAL, "--against", checkpoint, "--json")
    [entry] = json.loads(result.stdout)["models"]
    assert (entry["ratio"], entry["divergence"]["kl"], entry["divergence"]["top1"]) == (1.0, 0.0, 1.0)
    assert "predicted" not in entry
    assert "its prediction is left out" in result.stderr


def test_eval_against_a_model_of_other_tokens(model: Path, text_file: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(other)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    message = refused("eval", model, "--text", text_file, *EVAL, "--against", other)
    assert f"{model} and {other} have different vocabularies" in message


def test_eval_of_several_models(model: Path, checkpoint: Path, text_file: Path) -> None:
    words = ("eval", checkpoint, checkpoint, "--text", text_file, *EVAL, "--against", model, "--no-kl")
    first, second = answer(*words)["models"]
    assert first == second
    assert "divergence" not in first


def test_eval_on_a_local_task(model: Path, checkpoint: Path) -> None:
    task = Path(__file__).parent / "evaluation" / "data" / "general_knowledge.yaml"
    words = ("eval", checkpoint, "--against", model, "--tasks", task, "--limit", 2)
    document = answer(*words)
    scores = [*document["models"][0]["scores"], *document["against"]["scores"]]
    assert [(score["metric"], score["items"]) for score in scores] == [("acc", 2), ("acc_norm", 2)] * 2
    assert "perplexity" not in document["against"]
    message = refused("eval", model, "--tasks", model / "none.yaml")
    assert f"{model / 'none.yaml'} cannot be read: [Errno 2] No such file or directory" in message


def test_the_cards_command_makes_the_same_plan(
    plan: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = (checkpoint / "README.md").read_text().replace("\\\n", " ")
    command = next(line for line in card.splitlines() if line.startswith("gac allocate "))
    (tmp_path / "again").mkdir()
    monkeypatch.chdir(tmp_path / "again")
    assert run(*shlex.split(command)[1:]).exit_code == 0
    assert Plan.load("plan.json") == Plan.load(plan)
