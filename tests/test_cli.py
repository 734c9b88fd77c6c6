"""The command line on a tiny model: every command, its JSON, its exit status and its words."""

import json
import math
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import PreTrainedTokenizerFast

import gac
from gac.cli import main
from gac.cli.plot import plot
from gac.plan.plan import Plan
from gac.plan.recipe import KEYWORDS
from gac.testing import models
from tests.cli.commands import answer, refused, run

H100 = "nvidia-h100-80gb-hbm3"

EVAL = ("--windows", 2, "--length", 64)


@pytest.fixture(scope="module")
def work(prose: str, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Paths of a model, two texts, a plan and a compressed checkpoint, which tests read alone."""
    folder = tmp_path_factory.mktemp("work")
    paths = SimpleNamespace(**{name: folder / name for name in ("model", "text", "other", "plan", "small")})
    for saved in (models.tiny_model(), tiny_tokenizer):
        saved.save_pretrained(paths.model)
    paths.text.write_text(prose, encoding="utf-8")
    paths.other.write_text("0123 + 456 = 579; " * 100, encoding="utf-8")
    for words in (("allocate", "--calibration", f"{paths.text}:4x64"), ("compress", "--plan", paths.plan)):
        result = run(words[0], paths.model, *words[1:], "-o", paths.plan if words[0] == "allocate" else paths.small)
        assert result.exit_code == 0, result.output
    return paths


@pytest.mark.parametrize("words", [*main.commands, *(f"plot {kind}" for kind in plot.commands)])
def test_every_command_has_help_and_is_listed(words: str) -> None:
    *group, name = words.split()
    assert run(*group, "--help").stdout.count(f"\n  {name} ") == 1
    result = run(*group, name, "--help")
    assert (result.exit_code, "--json" in result.stdout) == (0, name != "plot")


def test_the_version() -> None:
    assert run("--version").stdout == f"gac, version {gac.__version__} ({gac.__distribution__})\n"


def test_commands_are_in_groups_of_one_line_each() -> None:
    shown = run("--help").stdout
    titles = [f"\n{title}:\n" for title in ("Plan", "Apply", "Check", "GPU", "Research")]
    assert sorted(titles, key=shown.index) == titles
    listed = [line for line in shown[shown.index(titles[0]) : shown.index("A first plan")].splitlines() if line.strip()]
    assert len(listed) == len(main.commands) + len(titles)
    assert not any(line.endswith("...") for line in listed)


def options_of(words: str) -> set[str]:
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", run(*words.split()).stdout, re.MULTILINE))


def test_help_lists_nine_options_and_help_all_the_others_too() -> None:
    first = {"--budget", "--memory", "--latency", "--scheme", "--profile", "--engine", "--calibration", "--workload"}
    always = {"--output", "--json", "--quiet", "--help-all", "--help"}
    shown, every = run("allocate", "--help").stdout, run("allocate", "--help-all").stdout
    assert len(shown.splitlines()) <= 40
    assert options_of("allocate --help") == first | always
    research = every.index("\nResearch:\n")
    assert every[:research].rstrip() == shown.rstrip()
    hidden = {word for row in main.commands["allocate"].params for word in row.opts if word[:2] == "--"}
    assert hidden <= options_of("allocate --help-all")
    assert {"--form", "--rule", "--solve-again", "--check-text"} <= hidden - options_of("allocate --help")
    frontier = {"--points", "--limit", "--plot"}
    assert options_of("frontier --help") == (first - {"--budget", "--memory", "--latency"}) | frontier | always
    assert "--form" in options_of("frontier --help-all")


OPTIONS: dict[str, dict[str, Any]] = {
    "--budget 0.7": {"budget": 0.7},
    "--budget 6B": {"budget": "6B"},
    "--memory 0.5": {"memory": 0.5},
    "--memory 6GB": {"memory": "6GB"},
    "--latency 0.9": {"latency": 0.9},
    "--latency decode:1@1024=0.8": {"latency": {"decode:1@1024": 0.8}},
    "--latency any": {"latency": "any"},
    "--kv-cache 0.5 --form latent:1": {"kv_cache": 0.5, "forms": ["latent:1"]},
    "--slack 0.01": {"slack": 0.01},
    "--rule uniform:down8": {"rule": "uniform:down8"},
    "--method svd": {"method": "svd"},
    "--calibration TEXT:2x64 --calibration TEXT:4x32": {"calibration": ["TEXT:2x64", "TEXT:4x32"]},
    "--calibration TEXT:2x64 --calibration self:2x64 --balance mean": {
        "calibration": ["TEXT:2x64", "self:2x64"],
        "balance": "mean",
    },
    "--seed 3": {"seed": 3},
    "--shots 2": {"shots": 2},
    "--bos": {"bos": True},
    "--form experts --same-count": {"forms": ["experts"], "same_count": True},
    "--form low_rank --form skip": {"forms": ["low_rank", "skip"]},
    "--scheme bf16 --scheme w4a16": {"schemes": ["bf16", "w4a16"]},
    "--no-align": {"align": False},
    "--align-to 16": {"align": 16},
    "--no-rotate": {"rotate": False},
    "--rotate": {"rotate": True},
    "--head w8a16": {"head": "w8a16"},
    f"--profile {H100}": {"profile": H100},
    "--workload decode:2@64": {"workloads": ["decode:2@64"]},
    "--no-fuse": {"fuse": False},
    "--tensor-parallel 2": {"tensor_parallel": 2},
    "--engine vllm": {"engine": "vllm"},
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


def test_a_recipe_file_replaces_the_options(work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = gac.Recipe.of(0.7, method="svd")
    recipe.save(tmp_path / "recipe.json")
    requests: list[gac.Recipe] = []
    monkeypatch.setattr("gac.api.allocate", lambda *_, recipe, **__: requests.append(recipe))
    words = ("allocate", work.model, "--recipe", tmp_path / "recipe.json", "--tokenizer", work.model)
    run(*words)
    assert requests == [recipe]
    result = run(*words, "--seed", 1)
    assert (result.exit_code, "--seed goes without --recipe" in result.stderr) == (2, True)


def test_allocate_notes_its_cost_and_shows_the_plan(work: Any, tmp_path: Path) -> None:
    target = tmp_path / "new" / "plan.json"
    options = ("--budget", 1, "--kv-cache", 0.5, "--form", "latent:1:int8", "--calibration", f"{work.text}:6x32")
    words = ("allocate", work.model, *options, "-o", target)
    result = run(*words)
    notes = " ".join(result.stderr.split())
    assert f"calibration on 6 windows of 32 tokens of {work.text}" in notes
    assert "of statistics and factors in" in notes
    assert "form latent:1: the model is run up to 20 times on 32 held-out tokens" in notes
    assert "layer q k v o gate up down kept loss" in " ".join(result.stdout.split())
    assert "GAC plan for" in result.stdout
    document, plan = answer(*words), Plan.load(target)
    assert (document["path"], document["aligned_fraction"]) == (str(target), plan.aligned_fraction)
    assert document["limits"][0]["used"] == plan.budget.used <= document["limits"][0]["limit"]
    assert document["prediction"]["loss"] == plan.prediction.loss


def test_several_texts_and_one_to_check(work: Any, tmp_path: Path) -> None:
    (tmp_path / "like.txt").write_text("<a href='x'>y</a> " * 50, encoding="utf-8")
    words = ("allocate", work.model, "--calibration", f"{work.text}:4x64", "--calibration")
    result = run(*words, f"{work.other}:2x64", "--check-text", tmp_path / "like.txt", "-o", tmp_path / "plan.json")
    assert result.exit_code == 0
    assert f"on 6 windows of 64 tokens of {work.text} (4) and {work.other} (2)" in result.stderr
    assert f"warning: {tmp_path / 'like.txt'} is unlike the calibration text" in result.stderr
    assert "windows of 32 and 64 tokens; expected one length" in refused(*words, f"{work.other}:2x32")


def test_where_nothing_can_be_written(work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert "Error: . is a directory; expected the path of a file." in refused("eval", "m", "-o", ".")
    assert "file is a file; expected a path below a directory." in refused("allocate", "m", "-o", "file/a")

    monkeypatch.setattr("gac.cli.options.TemporaryFile", Mock(side_effect=PermissionError(13, "Permission denied")))
    message = refused("allocate", work.model, "-o", tmp_path / "plan.json")
    assert f"nothing can be written to {tmp_path}: Permission denied; expected a writable path" in message


def test_an_interrupt_says_what_is_kept(work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gac.api.allocate", Mock(side_effect=KeyboardInterrupt))
    result = run("allocate", work.model, "-o", tmp_path / "plan.json")
    assert result.exit_code == 130
    assert "Interrupted. Progress is saved in GAC_HOME; rerun the command" in result.stderr


def test_compress_writes_a_checkpoint_that_opens(work: Any, tmp_path: Path) -> None:
    words = ("compress", work.model, "--plan", work.plan, "-o", tmp_path / "small")
    document = answer(*words)
    loaded = gac.load(tmp_path / "small")
    assert document["parameters"] == sum(parameter.numel() for parameter in loaded.parameters())
    assert document["parameters"] < document["dense_parameters"]
    assert (tmp_path / "small" / "tokenizer.json").is_file()
    assert "small holds a compressed checkpoint; expected a new or empty directory." in refused(*words)
    assert run(*words, "--overwrite").exit_code == 0


def test_eval_of_a_dense_model(work: Any, tmp_path: Path) -> None:
    words = ("eval", work.model, "--text", work.text, "--windows", 3, "--length", 64)
    document = answer(*words, "-o", tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == document
    [entry] = document.pop("models")
    assert not document
    assert set(entry) == {"name", "parameters", "dtype", "perplexity"}
    assert entry["perplexity"]["tokens"] == 3 * 63
    assert entry["perplexity"]["protocol"].endswith("BOS at the head of every window")
    [without] = answer(*words, "--no-bos")["models"]
    assert without["perplexity"]["protocol"].endswith("no BOS")


def test_eval_shows_predictions_with_measurements(work: Any, tmp_path: Path) -> None:
    arguments = ("eval", work.small, "--text", work.text, "--text", work.other, *EVAL, "--against", work.model)
    document = answer(*arguments, "-o", tmp_path / "report.json")
    assert run("plot", "prediction", tmp_path / "report.json", "-o", tmp_path / "figure.svg").exit_code == 0
    [entry], dense = document["models"], document["against"]
    assert [text["perplexity"]["text"] for text in (entry, *entry["also"])] == [str(work.text), str(work.other)]
    [also], [dense_also] = entry["also"], dense["also"]
    assert also["ratio"] == pytest.approx(also["perplexity"]["value"] / dense_also["perplexity"]["value"])
    assert set(also) == {"perplexity", "divergence", "ratio", "log_ratio"}  # the plan was calibrated on the other
    assert "predicted_perplexity" in entry
    assert entry["mean_log_ratio"] == pytest.approx((entry["log_ratio"] + also["log_ratio"]) / 2)
    assert entry["mean_ratio"] == pytest.approx(math.sqrt(entry["ratio"] * also["ratio"]))
    assert set(dense_also) == {"perplexity"}
    assert entry["ratio"] == pytest.approx(entry["perplexity"]["value"] / dense["perplexity"]["value"])
    assert entry["predicted"] == entry["plan"]["prediction"]["loss"]
    assert entry["divergence"]["tokens"] == 2 * 63
    counted = entry["plan"]
    assert counted["model_bytes"] == {"used": 2 * entry["parameters"], "total": 2 * dense["parameters"]}
    assert counted["bits"] == 8 * counted["bytes"]["used"] / counted["limits"][0]["total"]
    shown = " ".join(run(*arguments).stdout.split())
    tables = (
        "on other",
        "geometric mean",
        "targeted ones, with scales and zero points",
        "weights bits model of the model KV cache",
    )
    assert all(words in shown for words in ("predicted by its plan", *tables))


def test_eval_says_first_what_it_will_read(work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def evaluate(_models: Any, **options: Any) -> None:
        asked.append(options)
        raise gac.GacError("the end", "of", "it.")

    monkeypatch.setattr(gac, "evaluate", evaluate)
    three = "each of wiki-sample, news-sample, python-reference"
    for words, note in (
        ((), f"on each model at most 32 windows of 1,024 tokens of {three}"),
        (("--windows", "all"), f"on each model all windows of 1,024 tokens of {three}"),
        (
            ("--text", "samples", "--text", work.text, "--windows", 3),
            f"tokens of {three} and 3 windows of 1,024 tokens",
        ),
        (("--tasks", "samples"), "on each model the tasks hellaswag-sample, gsm8k-sample, last-word-sample"),
    ):
        assert note in run("eval", work.model, *words).stderr
    assert [(each["text"], each["windows"]) for each in asked] == [
        ("samples", None),
        ("samples", "all"),
        ("samples", 3),
        (None, None),
    ]


def test_eval_of_several_models_against_another_predicts_nothing(work: Any) -> None:
    words = ("eval", work.small, work.small, "--text", work.text, *EVAL, "--against", work.small, "--json")
    result = run(*words)
    assert "its prediction is left out" in result.stderr
    first, second = json.loads(result.stdout)["models"]
    assert first == second
    assert (first["ratio"], first["divergence"]["kl"], first["divergence"]["top1"]) == (1.0, 0.0, 1.0)
    assert "predicted" not in first
    assert "divergence" not in json.loads(run(*words, "--no-kl").stdout)["models"][0]


def test_eval_against_a_model_of_other_tokens(work: Any, tmp_path: Path) -> None:
    other = shutil.copytree(work.model, tmp_path / "other")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(other)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    message = refused("eval", work.model, "--text", work.text, *EVAL, "--against", other)
    assert f"{work.model} and {other} have different vocabularies" in message


def test_eval_on_a_local_task(work: Any) -> None:
    task = Path(__file__).parent / "evaluation" / "data" / "general_knowledge.yaml"
    words = ("eval", work.small, "--against", work.model, "--tasks", task, "--limit", 2)
    document = answer(*words)
    scores = [*document["models"][0]["scores"], *document["against"]["scores"]]
    assert [(score["metric"], score["items"]) for score in scores] == [("acc", 2), ("acc_norm", 2)] * 2
    assert "perplexity" not in document["against"]
    message = refused("eval", work.model, "--tasks", work.model / "none.yaml")
    assert f"{work.model / 'none.yaml'} cannot be read: [Errno 2] No such file or directory" in message


def test_the_cards_command_makes_the_same_plan(work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = (work.small / "README.md").read_text().replace("\\\n", " ")
    command = next(line for line in card.splitlines() if line.startswith("gac allocate "))
    monkeypatch.chdir(tmp_path)
    assert run(*shlex.split(command)[1:]).exit_code == 0
    assert Plan.load("plan.json") == Plan.load(work.plan)
