"""Contracts of every shipped form, scheme, method and rule, of examples written outside GAC, and what breaks them."""

import builtins
import dis
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import gac
from gac.allocation.rules import RULES
from gac.allocation.weight_rules import RankRule
from gac.forms import FORMS
from gac.forms.base import KVCache, Latency
from gac.forms.curvature.registry import METHODS
from gac.forms.head_dim import HeadDim
from gac.models.sites import Weight
from gac.runtime.modules import KINDS
from gac.runtime.plain import modeling_gac
from gac.runtime.storage.base import Storage
from gac.runtime.storage.modules import STORAGES
from gac.schemes import SCHEMES, Scheme, StorageSpec
from gac.testing import check_form, check_method, check_rule, check_scheme
from tests.cli.commands import answer, refused
from tests.extending.a_form import Picked, PickedLinear, PickedTensors
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


FORM_NAMES = [{"latent": "latent:1"}.get(form, form) for form in FORMS.names if form not in ("dense", "experts")]
"""Those that take weights of a Llama."""


@pytest.mark.parametrize("form", [*FORM_NAMES, "latent:int8", Picked()], ids=name)
def test_the_contract_of_every_form(form: Any) -> None:
    form = FORMS.get(form)
    check_form(form, *filter(form.applies_to, WEIGHTS))
    if form.name == "head_dim":
        check_form(form, method="palu-fold")  # which folds values


CONTRACTS = [
    *((check_scheme, SCHEMES, scheme) for scheme in (*SCHEMES.names, "w3a16:64", "w2a16:16", ShortMantissa())),
    *((check_method, METHODS, method) for method in (*METHODS.names, "asvd:0.25", "palu:2", Fwsvd())),
    *((check_rule, RULES, rule) for rule in (*RULES.names, "uniform:down8")),
]


@pytest.mark.parametrize(("check", "registry", "plugin"), CONTRACTS, ids=[name(plugin) for *_, plugin in CONTRACTS])
def test_the_contract_of_every_scheme_method_and_rule(check: Callable[[Any], None], registry: Any, plugin: Any) -> None:
    check(registry.get(plugin))


@pytest.fixture
def through(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, text_file: Path, tmp_path: Path
) -> Callable[..., tuple[gac.Plan, Any]]:
    """Allocate, compress, save, load and evaluate with plug-ins; the plan, and the model as it is loaded again."""

    def run(**plugins: Any) -> tuple[gac.Plan, Any]:
        options = {"calibration": f"{text_file}:2x64", "tokenizer": tiny_tokenizer, "profile": "nvidia-h100-80gb-hbm3"}
        gac.allocate(tiny_model, 0.7, progress=False, **options, **plugins).save(tmp_path / "plan.json")
        plan = gac.Plan.load(tmp_path / "plan.json")
        small = gac.compress(tiny_model, plan, tokenizer=tiny_tokenizer, progress=False)
        gac.save(small, tmp_path / "small", tokenizer=tiny_tokenizer)
        loaded = gac.load(tmp_path / "small")
        ids = torch.arange(40).reshape(2, 20)
        with torch.no_grad():
            assert torch.equal(small(ids).logits, loaded(ids).logits)
        params = plan.measured.params - plan.budget.total + plan.budget.used
        assert sum(parameter.numel() for parameter in loaded.parameters()) == params
        text = text_file.read_text(encoding="utf-8")
        assert gac.perplexity(loaded, tiny_tokenizer, text, windows=2, length=64, progress=False).value < 400
        return plan, loaded

    return run


def test_a_method_and_a_rule_of_ones_own(through: Callable[..., tuple[gac.Plan, Any]]) -> None:
    plan, _ = through(method=Fwsvd(), rule=Tapered())
    assert (plan.recipe.measure.method, plan.certificate.method) == ("fwsvd", "tapered")
    params = [sum(site.params for site in plan.sites if site.layer == layer) for layer in (0, 1)]
    assert params[0] > params[1]


def test_a_form_and_a_scheme_of_ones_own(through: Callable[..., tuple[gac.Plan, Any]]) -> None:
    scheme = ShortMantissa()
    plan, loaded = through(forms=["low_rank", Picked()], schemes=[scheme])
    assert {weight.scheme for weight in plan.weights} == {scheme.name}
    picked = [weight.name for weight in plan.weights if weight.form == "picked"]
    assert picked
    assert all(isinstance(loaded.get_submodule(name), PickedLinear) for name in picked)
    for name, parameter in loaded.named_parameters():
        if parameter.dim() > 1 and ".layers." in name:
            assert torch.equal(parameter, scheme.quantised(parameter))


def test_a_rule_of_an_installed_package_is_named_on_the_command_line(
    directory: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "rules-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Name: rules\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[gac.rules]\ntapered = tests.extending.a_rule:Tapered\n")
    asked = ("allocate", directory, "--calibration", f"{text_file}:2x64", "--rule", "tapered:down8")
    assert "rule 'tapered:down8' is unknown; expected one of loss, " in refused(*asked, "-o", tmp_path / "plan.json")
    monkeypatch.syspath_prepend(str(package.parent))
    plan = answer(*asked, "-o", tmp_path / "plan.json")
    assert plan["certificate"]["method"] == plan["recipe"]["rule"] == "tapered:down8"


PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")


def snippets(text: str) -> list[str]:
    return re.findall(r"^```py\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_page_shows_these_files() -> None:
    files = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("a_*.py")]
    assert len(snippets(PAGE)) >= len(files) == 4
    assert [block for block in snippets(PAGE) if not any(block.strip() in file for file in files)] == []


def globals_read(code: CodeType) -> Iterator[str]:
    """The names of a module that its code reads, functions and all."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
            yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from globals_read(inner)


SECTIONS = [section for section in PAGE.split("\n## ") if snippets(section)]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_the_snippets_of_a_section_import_what_they_use(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "PickedLinear", KINDS["PickedLinear"])
    code = compile("\n\n".join(snippets(section)), "extending.md", "exec")
    module = {"__name__": "extending"}
    exec(code, module)
    of_classes = {"__annotations__", "__module__", "__qualname__"}
    assert {*globals_read(code)} - {*module, *vars(builtins), *of_classes} == set()


def changed(base: type, **members: Any) -> Any:
    """An object of a class with other members; its name is its own."""
    return type(base.__name__, (base,), {"name": "changed", **members})()


class Wavering(RankRule):
    """Gives one rank more every time that it is asked."""

    name = "wavering"
    asked = 0

    def ranks(self, problem: Any, weights: Any, form: Any, fraction: float, limit: int) -> dict[str, int]:
        self.asked += 1
        return {weight.name: self.asked for weight in weights}


class OtherAxis(Latency):
    """Names an axis that its operation lacks."""

    def axis(self, weight: Any) -> str:
        return "r"


class DenseCache(KVCache):
    """Counts what the cache keeps of the dense weight."""

    def numbers(self, weight: Any, dim: int) -> int:
        return weight.cached_numbers


class Lossy(PickedTensors):
    """Forgets to compensate, and half of what the features held."""

    def parameters(self, work: Any, weight: Any, dim: int) -> dict[str, Tensor]:
        parameters = super().parameters(work, weight, dim)
        return parameters | {"linear.weight": parameters["linear.weight"] / 2}


@dataclass(frozen=True)
class PlainEights:
    """Numbers in 8-bit floating point, without scales."""

    linear = staticmethod(functional.linear)

    def tensors(self, rows: int, columns: int) -> Any:
        return {"eights": ((rows, columns), torch.float8_e4m3fn)}

    def values(self, tensors: Any, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        values: Tensor = tensors["eights"].to(dtype)
        return values


class Eights(PlainEights, Storage):
    """The same with GAC."""


class Doubled(PlainEights):
    """Gives twice the numbers."""

    def values(self, *args: Any) -> Tensor:
        return 2 * super().values(*args)


class OwnStorage(Scheme):
    """Stores numbers in ``Eights``."""

    name = dtype = "own"
    bits = 8
    storage = StorageSpec("Eights", {})

    def stored(self, matrix: Tensor, inputs: Any = None, gradients: Tensor | None = None) -> dict[str, Tensor]:
        return {"eights": matrix.to(torch.float8_e4m3fn)}


NAN = torch.full((16, 16), torch.nan, dtype=torch.float64)


@pytest.mark.parametrize(
    ("check", "plugin", "message"),
    [
        (check_method, changed(Fwsvd, two_sided=False), "two_sided is False"),
        (check_method, changed(Fwsvd, inputs=lambda self, moments: moments.inputs), "inputs are torch.float32"),
        (check_method, changed(Fwsvd, inputs=lambda self, moments: NAN[:3, :3]), r"inputs have shape \(3, 3\)"),
        (check_scheme, changed(ShortMantissa, quantised=lambda self, matrix: matrix), "lossy is True"),
        (check_scheme, changed(ShortMantissa, quantised=lambda self, matrix: 0.9 * matrix), "rounding again changes"),
        (check_scheme, changed(ShortMantissa, bytes=lambda self, rows, columns: rows * columns), "less than its 16"),
        (check_scheme, changed(ShortMantissa, storage=StorageSpec("Integers8", {})), "tables call it 'bf16'"),
        (check_scheme, OwnStorage(), "storage Eights is unknown; expected one of .*plain class in modeling_gac.py"),
        (check_form, changed(Picked, params=lambda self, weight, dim: dim), "1 parameters, its module holds 64"),
        (check_form, changed(Picked, applies_to=lambda self, weight: False), "takes no weight of a tiny Llama"),
        (check_form, changed(Picked, latency=property(OtherAxis)), "axis r is none of its operation"),
        (check_form, changed(HeadDim, cache=property(DenseCache)), "cache keeps .* of a token, not 128"),
        (check_form, changed(Picked, tensor_form=f"{__name__}:Lossy"), "at the full dim: logits differ by up to"),
        (check_rule, Wavering(), "wavering: another plan when asked again"),
    ],
)
def test_what_breaks_a_contract(check: Callable[[Any], None], plugin: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(plugin)


def test_a_storage_of_its_own_is_checked_with_and_without_gac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORAGES, "Eights", (Eights, ()))
    check_scheme(OwnStorage())  # outside GAC there is no plain class
    monkeypatch.setitem(modeling_gac.STORAGES, "Eights", PlainEights)
    check_scheme(OwnStorage())
    monkeypatch.setitem(modeling_gac.STORAGES, "Eights", Doubled)
    with pytest.raises(AssertionError, match="opened otherwise without GAC"):
        check_scheme(OwnStorage())
