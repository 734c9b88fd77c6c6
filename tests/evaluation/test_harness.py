"""The model gac, as lm-evaluation-harness runs it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from transformers import LlamaForCausalLM

import gac
from gac.core.errors import ModelError
from gac.evaluation.harness import GacLM
from gac.evaluation.tasks import open_suite
from tests.compression.compressed import MakePlan

KNOWLEDGE = Path(__file__).parent / "data" / "general_knowledge.yaml"


@pytest.mark.parametrize("model", ["gac", "hf"])
def test_scores_are_those_of_the_harness_itself(
    model: str, directory: Path, tiny_model: LlamaForCausalLM, tiny_tokenizer: Any
) -> None:
    suite = open_suite([str(KNOWLEDGE)], limit=4)
    tasks = list(suite.requested[str(KNOWLEDGE)]["tasks"].values())
    manager = TaskManager(include_defaults=False)
    arguments = f"pretrained={directory},dtype=float32"
    results = lm_eval.simple_evaluate(
        model, arguments, tasks, limit=4, device="cpu", task_manager=manager, bootstrap_iters=0
    )
    ours = {score.metric: score.value for score in suite.run(tiny_model, tiny_tokenizer)}
    assert {metric: results["results"]["general_knowledge"][f"{metric},none"] for metric in ours} == ours


def test_a_compressed_checkpoint(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: Any, make_plan: MakePlan, tmp_path: Path
) -> None:
    compressed: Any = tiny_model
    compressed.gac_plan = make_plan(tiny_model.config, {})
    gac.save(tiny_model, tmp_path / "small", tokenizer=tiny_tokenizer)
    runner = GacLM(str(tmp_path / "small"), device="cpu", dtype="bfloat16")
    assert runner.model.gac_plan == compressed.gac_plan
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
def test_a_text_is_scored_once_after_bos(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: Any, add_bos: bool | None
) -> None:
    text = "the rank of a weight"
    runner = GacLM(tiny_model, tokenizer=tiny_tokenizer, add_bos_token=add_bos)
    [score] = runner.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    ids = [tiny_tokenizer.bos_token_id, *tiny_tokenizer(text, add_special_tokens=False)["input_ids"]]
    with torch.no_grad():
        chances = tiny_model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    expected = chances.gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
    assert score == pytest.approx(expected, abs=1e-4)
    assert runner.add_bos_token is add_bos
