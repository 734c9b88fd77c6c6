"""Compression ends with seconds of healing: on a GPU by default, elsewhere on request."""

import copy
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trained import LENGTH, TOKENS, Trained

import gac
from gac.core.distributed.ranks import ALONE
from gac.core.errors import GacError, TextError
from gac.healing import compressing
from gac.healing.text import calibrated_text
from gac.measurement import text
from gac.plan.summary import apply_commands
from gac.reporting.evaluation import perplexity_table
from tests.cli.commands import answer
from tests.compression.applying import logits

PLANS: dict[str, dict[str, Any]] = {
    "low rank": {},
    "narrow, not fitted again": {"forms": ("narrow", "head_dim"), "budget": 0.6, "refit": "none"},
    "2 bits, rotated": {"schemes": ("w2a16:32",), "budget": 1.0, "rotate": True},
}


def compressed(learned: Trained, plan: gac.Plan, **options: Any) -> Any:
    model = copy.deepcopy(learned.model)
    return gac.compress(model, plan, tokenizer=learned.tokenizer, progress=False, **options)


@pytest.mark.parametrize("case", PLANS)
def test_the_model_comes_nearer_to_the_dense_one_in_its_forms(case: str, learned: Trained) -> None:
    fitted = learned.compressed(**PLANS[case])
    healed = compressed(learned, fitted.gac_plan, heal=TOKENS)
    [record] = healed.gac_plan.healed
    assert record.after < record.before
    assert (record.compressing, record.asked, record.blocks, record.dense) == (True, TOKENS, 0.0, False)
    assert record.texts == (str(learned.text),)
    assert replace(healed.gac_plan, healed=()) == fitted.gac_plan
    shapes = [{name: (each.shape, each.dtype) for name, each in m.state_dict().items()} for m in (fitted, healed)]
    assert shapes[0] == shapes[1]
    assert not torch.equal(logits(healed), logits(fitted))
    assert torch.equal(logits(healed), logits(compressed(learned, fitted.gac_plan, heal=TOKENS)))


def test_a_model_that_gains_nothing_stays_as_it_was_fitted(
    learned: Trained, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressing, "default_rate", lambda _params: 0.9)
    plan = learned.compressed().gac_plan
    with caplog.at_level(logging.WARNING):
        small = compressed(learned, plan, heal=200)
    assert small.gac_plan == plan
    assert "healing on 200 tokens won nothing on held-out text" in caplog.text
    assert torch.equal(logits(small), logits(learned.compressed()))


def test_nothing_is_healed_by_default_on_a_cpu(learned: Trained, caplog: Any) -> None:
    plan = learned.compressed().gac_plan
    with caplog.at_level(logging.INFO):
        assert compressed(learned, plan).gac_plan.healed == ()
    assert "not healed: it takes long on a CPU" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert compressed(learned, plan, heal=0).gac_plan.healed == ()
    assert "healed" not in caplog.text


@pytest.mark.parametrize(
    ("devices", "free", "obstacle"),
    [
        (("cuda:0",), True, None),
        (("cuda:0", "cuda:1"), True, "lies on 2 GPUs"),
        (("cuda:0",), False, "has no room to train"),
        (("cuda:0", "cpu"), True, "long on a CPU"),
    ],
)
def test_a_gpu_with_room_heals_by_default(
    devices: tuple[str, ...], free: bool, obstacle: str | None, learned: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = [SimpleNamespace(device=torch.device(device)) for device in devices]
    model = SimpleNamespace(parameters=lambda: parameters, get_memory_footprint=lambda: 10)
    monkeypatch.setattr(compressing, "fits", lambda _numbers, _device, reserved: free and reserved == 10)
    answered = compressing._obstacle(learned.compressed().gac_plan, model, ALONE)
    assert answered is None if obstacle is None else obstacle in str(answered)


def test_all_windows_of_a_named_text_are_trained_on_and_of_documents_those_of_the_plan(learned: Trained) -> None:
    loaded = SimpleNamespace(tokenizer=learned.tokenizer, model=learned.model)
    few = text.calibration_windows(text.TextSpec(str(learned.text), 10, LENGTH), learned.tokenizer)
    every = text.every_window(str(learned.text), learned.tokenizer, LENGTH)
    named = calibrated_text(few, loaded, None, ())
    assert len(every) > 10
    assert len(named.train) + len(named.heldout) == len(every)
    spared = calibrated_text(replace(few, name="self", spare=every.ids[:5]), loaded, None, ())
    assert len(spared.train) + len(spared.heldout) == len(few) + 5
    documents = calibrated_text(replace(few, name="10 documents"), loaded, None, ("digest",))
    assert (len(documents.train) + len(documents.heldout), documents.documents) == (10, ("digest",))
    with pytest.raises(TextError, match="has 4 windows of 64 tokens to heal on"):
        calibrated_text(replace(few, name="4 documents", ids=few.ids[:4]), loaded, None, ())


def test_too_few_documents_to_heal_on_are_refused(learned: Trained) -> None:
    documents = gac.Documents([learned.text.read_text()], windows=4, length=LENGTH)
    options = {"latency": "any", "profile": "nvidia-h100-80gb-hbm3", "fuse": False, "progress": False}
    plan = gac.allocate(learned.model, 0.4, tokenizer=learned.tokenizer, calibration=documents, **options)
    with pytest.raises(GacError, match="has 4 windows of 64 tokens to heal on"):
        compressed(learned, plan, calibration=documents, heal=TOKENS)


def test_the_command_says_what_it_won_and_the_card_how_to_do_it_again(learned: Trained, tmp_path: Path) -> None:
    for part in (learned.model, learned.tokenizer):
        part.save_pretrained(tmp_path / "dense")
    plan = learned.compressed().gac_plan
    plan.save(tmp_path / "plan.json")
    command = "compress", tmp_path / "dense", "--plan", tmp_path / "plan.json", "--heal", TOKENS
    document = answer(*command, "-o", tmp_path / "small")
    [record] = document["plan"]["healed"]
    assert record["after"] < record["before"]
    small = gac.load(tmp_path / "small", device="cpu")
    assert apply_commands(small.gac_plan)[0].endswith(f"--heal {TOKENS} -o DIR")
    assert len(apply_commands(small.gac_plan)) == 1
    twice = learned.heal(small).gac_plan
    assert [each.compressing for each in twice.healed] == [True, False]
    assert [line.split()[1] for line in apply_commands(twice)] == ["compress", "heal"]
    against = {"against": learned.model, "tokenizer": learned.tokenizer}
    result = gac.evaluate(small, text=str(learned.text), length=LENGTH, kl=False, **against)
    assert "  predicted by its plan before healing" in [row[0] for row in perplexity_table(result).rows]
