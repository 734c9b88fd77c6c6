"""The command line on a tiny model: every command, its JSON, its exit status and its words."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import gac
from gac.plan import Plan
from tests.cli.commands import answer, run

H100 = "nvidia-h100-80gb-hbm3"

COMMANDS = (
    "profile",
    "profiles",
    "cliffs",
    "explain",
    "study",
    "graph",
    "allocate",
    "frontier",
    "compare",
    "compress",
    "eval",
    "export",
)


@pytest.fixture
def model(tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """A tiny model's directory, with its tokenizer."""
    tiny_model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


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


# --- help and usage -------------------------------------------------------------------------------------------------


def test_help_lists_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_the_version() -> None:
    assert run("--version").stdout == f"gac, version {gac.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["allocate", "m", "--budget", "most"], "'most' is not a valid float."),
        (["allocate", "m", "--latency", "prefill:1x1"], "'prefill:1x1' is not like 0.85 or prefill:1x1024=0.85."),
        (["allocate", "m", "--latency", "1", "--latency", "decode:1@1=1"], "give one fraction for all workloads"),
        (["allocate", "m", "--fuse", "--fuse-where-faster"], "--fuse goes without --fuse-where-faster."),
        (["eval", "m", "--windows", "0"], "0 is not in the range x>=1."),
        (["eval"], "Missing argument 'MODEL_OR_DIR...'."),
        (["eval", "m", "--tasks", "piqa,"], "'piqa,' is not like hellaswag,piqa or task.yaml."),
        (["squeeze"], "No such command 'squeeze'."),
    ],
)
def test_usage_errors_exit_with_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


# --- a model --------------------------------------------------------------------------------------------------------


def test_allocate_writes_a_plan_and_answers_with_it(model: Path, text_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "plan.json"
    document = answer("allocate", model, "--budget", 0.7, "--calibration", f"{text_file}:4x64", "-o", target)
    plan = Plan.load(target)
    assert document["path"] == str(target)
    assert document["limits"][0]["used"] == plan.budget.used <= document["limits"][0]["limit"]
    assert document["prediction"]["loss"] == plan.prediction.loss
    assert document["aligned_fraction"] == 1.0


def test_allocate_says_what_it_costs_and_shows_the_plan(model: Path, text_file: Path, tmp_path: Path) -> None:
    result = run("allocate", model, "--calibration", f"{text_file}:4x64", "-o", tmp_path / "plan.json")
    assert f"calibration on 4 windows of 64 tokens of {text_file}" in result.stderr
    assert "of statistics and factors in" in result.stderr
    assert "layer q k v o gate up down kept loss" in " ".join(result.stdout.split())
    assert "GAC plan for" in result.stdout


def test_the_options_of_allocate_reach_the_plan(model: Path, text_file: Path, tmp_path: Path) -> None:
    options = ("--method", "svd", "--form", "low_rank", "--no-align", "--seed", 3, "--profile", H100)
    more = ("--workload", "decode:2@64", "--tokenizer", model, "-o", tmp_path / "plan.json")
    assert run("allocate", model, "--calibration", f"{text_file}:4x64", *options, *more).exit_code == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert (plan.recipe.measure.method, plan.recipe.space.forms, plan.recipe.space.align, plan.recipe.measure.seed) == (
        "svd",
        ("low_rank",),
        False,
        3,
    )
    assert [workload.workload for workload in plan.workloads] == ["decode:2@64"]


def test_dims_are_aligned_to_a_number(model: Path, text_file: Path, tmp_path: Path) -> None:
    made = ("allocate", model, "--calibration", f"{text_file}:4x64", "-o", tmp_path / "plan.json", "--align-to", 16)
    assert run(*made).exit_code == 0
    assert Plan.load(tmp_path / "plan.json").recipe.space.align == 16
    assert "--align-to goes without --no-align." in run(*made, "--no-align").stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--budget", "1.2"],
            "Error: limits.params=1.2; expected a number above 0 and at most 1, the kept fraction of what the dense "
            "model takes. Give a fraction such as 0.8.\n",
        ),
        (
            ["--calibration", "wiki"],
            "Error: text 'wiki' is neither known nor a file; "
            "expected one of wiki-sample, wikitext2, c4, or a path. Did you mean 'wikitext2'?\n",
        ),
        (
            ["--method", "magic"],
            "Error: method 'magic' is unknown; expected one of kfac, svd, asvd, svd-llm, palu, palu-fold. ",
        ),
        (
            ["--form", "wide"],
            "Error: form 'wide' is unknown; expected one of dense, low_rank, narrow, head_dim, grouped. ",
        ),
        (["--workload", "chat"], "Error: workload 'chat'; expected prefill:BxS or decode:B@C with positive integers. "),
        (
            ["--kv-cache", "0.5", "--form", "head_dim", "--budget", "1"],
            "Error: a KV-cache limit of 0.5; expected at least 0.7500, the smallest that forms head_dim can reach. ",
        ),
        (["--latency", "decode:1@1024=0.9"], "Error: the profile lacks the latency of model.layers.0.self_attn.q_proj"),
        (
            ["--decode-kernel", "triton"],
            "Error: the profile lacks the latency of model.layers.0.self_attn.q_proj for decode:1@1024 in ",
        ),
    ],
)
def test_allocate_refuses(options: list[str], message: str, model: Path, text_file: Path, tmp_path: Path) -> None:
    calibration = () if "--calibration" in options else ("--calibration", f"{text_file}:4x64")
    result = run("allocate", model, *calibration, *options, "-o", tmp_path / "plan.json")
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (tmp_path / "plan.json").exists()


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    result = run("allocate", tmp_path / "nothing", "-o", tmp_path / "plan.json")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: model '{tmp_path / 'nothing'}': no such directory; ")


def test_a_plan_is_not_written_over_a_directory(model: Path, tmp_path: Path) -> None:
    result = run("allocate", model, "-o", tmp_path)
    assert result.exit_code == 1
    assert result.stderr == (f"Error: {tmp_path} is a directory; expected the path of a file. Name a file in it.\n")


def test_a_plan_is_not_written_below_a_file(model: Path, text_file: Path) -> None:
    result = run("allocate", model, "-o", text_file / "plan.json")
    assert result.exit_code == 1
    assert f"{text_file} is a file; expected a path below a directory." in result.stderr


def test_a_plan_is_not_written_where_nothing_can_be(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("gac.cli.files.TemporaryFile", refuse)
    result = run("allocate", model, "-o", tmp_path / "plan.json")
    assert result.exit_code == 1
    assert f"nothing can be written to {tmp_path}: Permission denied; expected a writable path" in result.stderr


def test_an_interrupt_says_what_is_kept(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_arguments: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gac.api.allocate", stop)
    result = run("allocate", model, "-o", tmp_path / "plan.json")
    assert result.exit_code == 130
    assert "Interrupted. Finished layers" in result.stderr
    assert "the same command goes on from there" in result.stderr


def test_compress_writes_a_checkpoint_that_opens(model: Path, plan: Path, tmp_path: Path) -> None:
    document = answer("compress", model, "--plan", plan, "-o", tmp_path / "small")
    loaded = gac.load(tmp_path / "small")
    assert document["parameters"] == sum(parameter.numel() for parameter in loaded.parameters())
    assert document["parameters"] < document["dense_parameters"]
    assert (tmp_path / "small" / "tokenizer.json").is_file()


def test_compress_replaces_a_checkpoint_only_when_asked(model: Path, plan: Path, checkpoint: Path) -> None:
    refused = run("compress", model, "--plan", plan, "-o", checkpoint)
    assert refused.exit_code == 1
    assert f"{checkpoint} holds a compressed checkpoint; expected a new or empty directory." in refused.stderr
    assert run("compress", model, "--plan", plan, "-o", checkpoint, "--overwrite").exit_code == 0


def test_compress_never_replaces_anything_else(model: Path, plan: Path) -> None:
    result = run("compress", model, "--plan", plan, "-o", model, "--overwrite")
    assert result.exit_code == 1
    assert f"{model} exists and is no compressed checkpoint" in result.stderr


def test_compress_without_a_plan(model: Path, tmp_path: Path) -> None:
    result = run("compress", model, "--plan", tmp_path / "none.json", "-o", tmp_path / "small")
    assert result.exit_code == 1
    assert f"plan {tmp_path / 'none.json'} cannot be read: No such file or directory" in result.stderr


def test_eval_of_a_dense_model(model: Path, text_file: Path) -> None:
    document = answer("eval", model, "--text", text_file, "--windows", 3, "--length", 64)
    assert set(document) == {"models"}
    [found] = document["models"]
    assert found["perplexity"]["tokens"] == 3 * 63
    assert set(found) == {"name", "parameters", "dtype", "perplexity"}


def test_eval_sets_the_prediction_beside_what_is_measured(model: Path, checkpoint: Path, text_file: Path) -> None:
    arguments = ("eval", checkpoint, "--text", text_file, "--windows", 3, "--length", 64, "--against", model)
    document = answer(*arguments)
    [found], dense = document["models"], document["against"]
    assert found["ratio"] == pytest.approx(found["perplexity"]["value"] / dense["perplexity"]["value"])
    assert found["predicted"] == found["plan"]["prediction"]["loss"]
    assert found["divergence"]["tokens"] == 3 * 63
    shown = run(*arguments).stdout
    assert "predicted by its plan" in shown
    assert "chosen dims are multiples of 8" in shown


def test_eval_against_another_model_predicts_nothing(checkpoint: Path, text_file: Path) -> None:
    arguments = ("eval", checkpoint, "--text", text_file, "--windows", 2, "--length", 64, "--against", checkpoint)
    [found] = answer(*arguments)["models"]
    assert (found["ratio"], found["divergence"]["kl"], found["divergence"]["top1"]) == (1.0, 0.0, 1.0)
    assert "predicted" not in found
    assert "its prediction is left out" in run(*arguments).stderr


def test_eval_against_a_model_of_other_tokens(model: Path, text_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    PreTrainedTokenizerFast.from_pretrained(other).add_tokens(["<new>"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(other)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    result = run("eval", model, "--text", text_file, "--windows", 2, "--length", 64, "--against", other)
    assert result.exit_code == 1
    assert f"{model} and {other} have different vocabularies" in result.stderr


def test_eval_saves_its_document(model: Path, text_file: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    document = answer("eval", model, "--text", text_file, "--windows", 2, "--length", 64, "-o", report)
    assert json.loads(report.read_text()) == document


def test_eval_of_several_models(model: Path, checkpoint: Path, text_file: Path) -> None:
    arguments = (
        "eval",
        checkpoint,
        checkpoint,
        "--text",
        text_file,
        "--windows",
        2,
        "--length",
        64,
        "--against",
        model,
    )
    document = answer(*arguments, "--no-kl")
    first, second = document["models"]
    assert first == second
    assert "divergence" not in first
    assert run(*arguments).stdout.count("predicted by its plan") == 2


def test_eval_on_a_local_task(model: Path, checkpoint: Path) -> None:
    task = Path(__file__).parent / "evaluation" / "data" / "general_knowledge.yaml"
    arguments = ("eval", checkpoint, "--against", model, "--tasks", task, "--limit", 3)
    document = answer(*arguments)
    scores = [*document["models"][0]["scores"], *document["against"]["scores"]]
    assert [(score["metric"], score["items"]) for score in scores] == [("acc", 3), ("acc_norm", 3)] * 2
    assert "perplexity" not in document["against"]
    assert "the first 3 of 40 items of general_knowledge 1.0" in run(*arguments).stdout


def test_eval_on_an_unknown_task(model: Path) -> None:
    result = run("eval", model, "--tasks", model / "none.yaml")
    assert result.exit_code == 1
    assert f"{model / 'none.yaml'} cannot be read: [Errno 2] No such file or directory" in result.stderr


def test_eval_of_unknown_text(model: Path) -> None:
    result = run("eval", model, "--text", "no such text")
    assert result.exit_code == 1
    assert "text 'no such text' is neither known nor a file" in result.stderr


def test_the_cards_command_makes_the_same_plan(
    plan: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = (checkpoint / "README.md").read_text().replace("\\\n", " ")
    command = next(line for line in card.splitlines() if line.startswith("gac allocate "))
    (tmp_path / "again").mkdir()
    monkeypatch.chdir(tmp_path / "again")
    assert run(*shlex.split(command)[1:]).exit_code == 0
    assert Plan.load("plan.json") == Plan.load(plan)
