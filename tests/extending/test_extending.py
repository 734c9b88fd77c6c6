"""Forms, schemes, methods and rules: the contract of every shipped one, and of examples written outside GAC.

The examples also go all the way: allocate, compress, save, load, evaluate.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import gac
from gac.allocation.rules import RULES
from gac.forms import FORMS
from gac.forms.curvature.registry import METHODS
from gac.models.sites import Weight
from gac.schemes import SCHEMES
from gac.testing import check_form, check_method, check_rule, check_scheme
from tests.extending.a_form import Picked, PickedLinear
from tests.extending.a_method import Fwsvd
from tests.extending.a_rule import Tapered
from tests.extending.a_scheme import ShortMantissa

WEIGHTS = [
    Weight("w", 96, 64, neurons=side, values=side, heads=8, cached=True, blocks=blocks)
    for side in ("out", "in")
    for blocks in (1, 2)
]


def name(plugin: Any) -> str:
    return str(getattr(plugin, "name", plugin))


@pytest.fixture(autouse=True)
def _registries_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (FORMS, SCHEMES, METHODS, RULES):
        monkeypatch.setattr(registry, "_known", dict(registry._known))


@pytest.mark.parametrize(
    "form",
    ["low_rank", "narrow", "narrow_pair", "head_dim", "latent:1", "latent:2", "latent:int8", "latent:1:int4", Picked()],
    ids=name,
)
def test_the_contract_of_every_form(form: Any) -> None:
    known = FORMS.get(form)
    check_form(known, *filter(known.applies_to, WEIGHTS))


def test_values_that_a_method_folds_keep_the_contract_of_the_form() -> None:
    check_form(FORMS.get("head_dim"), method="palu-fold")


@pytest.mark.parametrize("scheme", [*SCHEMES.names, ShortMantissa()], ids=name)
def test_the_contract_of_every_scheme(scheme: Any) -> None:
    check_scheme(SCHEMES.get(scheme))


@pytest.mark.parametrize("method", [*METHODS.names, "asvd:0.25", "palu:2", Fwsvd()], ids=name)
def test_the_contract_of_every_method(method: Any) -> None:
    check_method(METHODS.get(method))


@pytest.mark.parametrize("rule", [*RULES.names, "uniform:down8", "sensitivity:pad16", Tapered()], ids=name)
def test_the_contract_of_every_rule(rule: Any) -> None:
    check_rule(RULES.get(rule))


def through(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, text: Path, folder: Path, **arguments: Any
) -> Any:
    """The plan, and the model that it led to as it is loaded again."""
    options = {"calibration": f"{text}:2x64", "tokenizer": tokenizer, "profile": "nvidia-h100-80gb-hbm3"}
    gac.allocate(model, 0.7, progress=False, **options, **arguments).save(folder / "plan.json")
    plan = gac.Plan.load(folder / "plan.json")
    small = gac.compress(model, plan, tokenizer=tokenizer, progress=False)
    gac.save(small, folder / "small", tokenizer=tokenizer)
    loaded = gac.load(folder / "small")
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        assert torch.equal(small(ids).logits, loaded(ids).logits)
    kept = plan.measured.params - plan.budget.total + plan.budget.used
    assert sum(parameter.numel() for parameter in loaded.parameters()) == kept
    prose = text.read_text(encoding="utf-8")
    assert gac.perplexity(loaded, tokenizer, prose, windows=2, length=64, progress=False).value < 400
    return plan, loaded


def test_a_method_and_a_rule_of_ones_own(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, text_file: Path, tmp_path: Path
) -> None:
    plan, _ = through(tiny_model, tiny_tokenizer, text_file, tmp_path, method=Fwsvd(), rule=Tapered())
    assert (plan.recipe.measure.method, plan.certificate.method) == ("fwsvd", "tapered")
    kept = [sum(site.params for site in plan.sites if site.layer == layer) for layer in (0, 1)]
    assert kept[0] > kept[1]


def test_a_form_of_ones_own(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, text_file: Path, tmp_path: Path
) -> None:
    forms = ["low_rank", Picked()]
    plan, loaded = through(tiny_model, tiny_tokenizer, text_file, tmp_path, forms=forms)
    picked = [weight.name for weight in plan.weights if weight.form == "picked"]
    assert picked
    assert all(isinstance(loaded.get_submodule(name), PickedLinear) for name in picked)


def test_a_scheme_of_ones_own(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, text_file: Path, tmp_path: Path
) -> None:
    plugin = ShortMantissa()
    plan, loaded = through(tiny_model, tiny_tokenizer, text_file, tmp_path, schemes=[plugin])
    assert {weight.scheme for weight in plan.weights} == {plugin.name}
    assert {weight.form for weight in plan.weights} > {"dense"}
    assert plan.prediction.loss > 0
    for name, parameter in loaded.named_parameters():
        if parameter.dim() > 1 and ".layers." in name:
            assert torch.equal(parameter, plugin.quantised(parameter))


def test_the_page_shows_these_files() -> None:
    folder = Path(__file__).parent
    page = (folder.parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
    files = [path.read_text(encoding="utf-8") for path in folder.glob("a_*.py")]
    shown = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(shown) >= len(files) == 4
    assert [block for block in shown if not any(block.strip() in file for file in files)] == []


def test_a_form_is_short() -> None:
    assert len((Path(__file__).parent / "a_form.py").read_text(encoding="utf-8").splitlines()) < 120
