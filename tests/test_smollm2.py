"""What needs the packaged SmolLM2 or the packaged text: in one file, so that one process reads each of them once."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

import gac
from gac.evaluation.perplexity import perplexity
from gac.evaluation.tasks import open_suite
from gac.measurement.samples import news_sample
from gac.measurement.text import calibration_windows, evaluation_windows
from gac.measurement.wikipedia import wiki_sample
from gac.models.loading import Loaded, load_model
from tests.measurement.ordinals import Ordinals

pytestmark = pytest.mark.smollm2
KNOWLEDGE = Path(__file__).parent / "evaluation" / "data" / "general_knowledge.yaml"
PROMPT = torch.tensor([[1, 504, 3575, 282, 4649]])

_LOGITS = """
import sys, torch, gac
model = gac.load(sys.argv[1])
with torch.inference_mode():
    torch.save(model(torch.tensor([[1, 504, 3575, 282, 4649]])).logits, sys.argv[2])
"""


@pytest.fixture(scope="module")
def smollm2() -> Loaded:
    """SmolLM2 on the CPU, read once: copy the model before changing it."""
    return load_model("smollm2", device="cpu")


@pytest.fixture(scope="module")
def two_layers(smollm2: Loaded) -> Any:
    """Its first two layers: real weights at real sizes, in a tenth of the time."""
    model: Any = deepcopy(smollm2.model)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    return model


def test_at_four_fifths(smollm2: Loaded, two_layers: Any, tmp_path: Path) -> None:
    tokenizer = smollm2.tokenizer
    options = {"profile": "nvidia-h100-80gb-hbm3", "calibration": "wiki-sample:2x128", "tokenizer": tokenizer}
    plan = gac.allocate(two_layers, 0.8, **options)
    assert plan.budget.used == sum(weight.params for weight in plan.weights)
    assert plan.budget.used <= plan.budget.limit == plan.budget.total * 8 // 10
    assert plan.aligned_fraction == 1.0

    small = gac.compress(deepcopy(two_layers), plan, tokenizer=tokenizer)
    counted = sum(parameter.numel() for parameter in small.parameters())
    assert counted == plan.measured.params - plan.budget.total + plan.budget.used

    gac.save(small, tmp_path / "small", tokenizer=tokenizer)
    code = [sys.executable, "-c", _LOGITS, str(tmp_path / "small"), str(tmp_path / "logits.pt")]
    subprocess.run(code, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    with torch.inference_mode():
        assert torch.equal(torch.load(tmp_path / "logits.pt"), small(PROMPT).logits)

    cached, uncached = (
        small.generate(PROMPT, max_new_tokens=8, do_sample=False, use_cache=use_cache) for use_cache in (True, False)
    )
    assert torch.equal(cached, uncached)
    assert isfinite(perplexity(small, tokenizer, windows=2, length=256).value)


def test_it_knows_english_and_has_general_knowledge(smollm2: Loaded) -> None:
    measured = perplexity(smollm2.model, smollm2.tokenizer, windows=1, length=256)
    assert measured.protocol == "wiki-sample, 1 windows x 256 in even steps from token 204800, non-overlapping, no BOS"
    assert 10 < measured.value < 40
    scores = open_suite([str(KNOWLEDGE)], limit=8).run(smollm2.model, smollm2.tokenizer, batch=8)
    assert {score.metric: score.value >= 0.5 for score in scores} == {"acc": True, "acc_norm": True}


def test_it_saves_as_any_other_model(smollm2: Loaded, tmp_path: Path) -> None:
    assert (smollm2.name, smollm2.model.dtype) == ("smollm2", torch.float32)
    assert load_model(smollm2.model).name == "smollm2"
    smollm2.model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    again = load_model(tmp_path, device="cpu").model
    for name, weight in smollm2.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)


@pytest.mark.parametrize(
    ("name", "windows", "read", "characters"),
    [("wiki-sample", 200, wiki_sample, 2_900_000), ("news-sample", 32, news_sample, 350_000)],
)
def test_packaged_text_never_calibrates_on_what_it_evaluates(
    name: str, windows: int, read: Callable[[], str], characters: int
) -> None:
    calibrated = calibration_windows(f"{name}:{windows}x1024", Ordinals())
    evaluated = evaluation_windows(name, Ordinals(), length=1000)
    text = "".join(map(chr, calibrated.ids.flatten().tolist() + evaluated.ids.flatten().tolist()))
    assert evaluated.start == calibrated.ids.numel() == windows * 1024
    assert text == read()[: len(text)]
    assert len(text) > characters


def test_packaged_tasks_have_their_items() -> None:
    suite = open_suite(["samples"])
    items = {name: list(task.test_docs()) for each in suite.requested.values() for name, task in each["tasks"].items()}
    counts = {name: len(docs) for name, docs in items.items()}
    assert counts == {"hellaswag-sample": 100, "gsm8k-sample": 100, "last-word-sample": 103}
    assert all(doc["after"].strip() in doc["before"] for doc in items["last-word-sample"])
    calibrated = news_sample()[: 32 * 1024 * 5]  # five characters a token are more than tokenizers reach on news
    assert not any(doc["before"] in calibrated for doc in items["last-word-sample"])
