"""A method and a rule written outside GAC, from the plan to the perplexity; and the contracts of the shipped ones."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import gac
from gac.allocation.rules import RULES
from gac.sensitivity.registry import METHODS
from gac.testing import check_method, check_rule
from tests.extending.a_method import Fwsvd
from tests.extending.a_rule import Tapered


def name(own: Any) -> str:
    return str(getattr(own, "name", own))


@pytest.fixture(autouse=True)
def _registries_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (METHODS, RULES):
        monkeypatch.setattr(registry, "_known", dict(registry._known))


@pytest.mark.parametrize("method", [*METHODS.names, "asvd:0.25", "palu:2", Fwsvd()], ids=name)
def test_the_contract_of_every_method(method: Any) -> None:
    check_method(METHODS.get(method))


@pytest.mark.parametrize("rule", [*RULES.names, "uniform:down8", "sensitivity:pad16", Tapered()], ids=name)
def test_the_contract_of_every_rule(rule: Any) -> None:
    check_rule(RULES.get(rule))


def test_a_method_and_a_rule_of_ones_own_end_to_end(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, text_file: Path, tmp_path: Path
) -> None:
    plan = gac.allocate(
        tiny_model,
        0.7,
        method=METHODS.name(Fwsvd()),
        rule=RULES.name(Tapered()),
        calibration=f"{text_file}:2x64",
        tokenizer=tiny_tokenizer,
        profile="nvidia-h100-80gb-hbm3",
        progress=False,
    )
    assert (plan.method, plan.certificate.method) == ("fwsvd", "tapered")
    kept = [sum(site.params for site in plan.sites if site.layer == layer) for layer in (0, 1)]
    assert kept[0] > kept[1]
    plan.save(tmp_path / "plan.json")
    small = gac.compress(tiny_model, gac.Plan.load(tmp_path / "plan.json"), tokenizer=tiny_tokenizer, progress=False)
    gac.save(small, tmp_path / "small", tokenizer=tiny_tokenizer)
    loaded = gac.load(tmp_path / "small")
    assert sum(one.numel() for one in loaded.parameters()) == plan.budget.model - plan.budget.total + plan.budget.used
    text = text_file.read_text(encoding="utf-8")
    found = gac.perplexity(loaded, tiny_tokenizer, text, windows=2, length=64, progress=False)
    assert found.value < 400
