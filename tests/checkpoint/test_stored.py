"""Weights of few bits in checkpoints: not one byte over the plan, any form, scheme and family; damage is named."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import gac
from gac.core.errors import CheckpointError
from gac.forms import form_named
from gac.models.families import supported
from gac.runtime.contract import DIGESTS
from gac.runtime.fusion.shared_gemm import FusedMember
from gac.runtime.header import replace_weights
from gac.runtime.storage.modules import count_parameters, stored_modules
from tests.checkpoint.conftest import copied, edit
from tests.compression.applying import IDS, logits
from tests.compression.compressed import MakePlan
from tests.compression.stored import CHOOSY, SCHEMES, config_of, held_bytes, in_schemes, mixed, stored, stored_model
from tests.models.small import TWO_KINDS, every_layout, small_config, small_model

Q, K, V, OUT = (f"model.layers.0.self_attn.{name}_proj" for name in "qkvo")
GATE, UP, DOWN = (f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down"))
CHOSEN = {Q: ("low_rank", 10, "w3a16:32"), DOWN: ("dense", 64, "w4a16:32"), OUT: ("low_rank", 10, "bf16")}

# --- every form, scheme and family ----------------------------------------------------------------------------------


@every_layout
def test_it_is_saved_loaded_and_generates(model_type: str, make_plan: MakePlan, tmp_path: Path) -> None:
    model = stored_model(model_type, make_plan)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    planned, _ = model.gac_plan.bytes
    assert held_bytes(tensors, model.gac_plan) == planned
    loaded = gac.load(tmp_path, device="cpu")
    assert torch.equal(logits(loaded), logits(model))
    given: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(loaded.generate(IDS, **given), model.generate(IDS, **given))


def test_every_form_is_there_in_every_scheme() -> None:
    alike = {*supported()} - {*TWO_KINDS}  # in the others a form meets a scheme in layers of one kind alone
    for model_type in alike:
        chosen = mixed(config_of(model_type)).values()
        found = Counter((form_named(form).kind, scheme) for form, _, scheme in chosen)
        forms = {form_named(form).kind for form, _, _ in chosen}
        assert found.keys() - {*product(forms, CHOOSY)} == {*product(forms, SCHEMES)}
        assert {scheme for _, scheme in found} == {*SCHEMES, *CHOOSY}


def small_llama() -> Any:
    config = small_config("llama")
    config.dtype = torch.bfloat16
    return small_model(config)


# --- one model ------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(make_plan: MakePlan) -> Any:
    return stored(small_llama(), make_plan, CHOSEN)


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> Path:
    gac.save(model, tmp_path / "saved")
    return tmp_path / "saved"


def test_parameters_are_counted_and_exported_in_the_models_dtype(model: Any, saved: Path, tmp_path: Path) -> None:
    plan = model.gac_plan
    assert count_parameters(model) - plan.budget.used == sum(
        one.numel() for name, one in model.named_parameters() if "norm" in name or "embed" in name or "lm_head" in name
    )
    gac.export(saved, tmp_path / "merged", merge=True)
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(merged.get_submodule(DOWN).weight, model.get_submodule(DOWN).values(torch.bfloat16))
    assert merged.num_parameters() == small_model(small_config("llama")).num_parameters()
    assert (logits(merged) - logits(model)).abs().max() < 0.05 * logits(model).abs().max()


def test_weights_of_one_scheme_share_a_gemm(make_plan: MakePlan, tmp_path: Path) -> None:
    config = small_config("llama")
    alike = {one.replace(".0.", ".1."): ("low_rank", 10, "w4a16:32") for one in (Q, K, V)}
    model = stored(small_model(config), make_plan, alike | CHOSEN, fused=True)
    plain = stored(small_model(config), make_plan, alike | CHOSEN)
    joined = [name for name, one in stored_modules(model).items() if getattr(one, "shared", None)]
    assert {name.replace(".first", "") for name in joined} == {*alike}
    assert [name for name, module in model.named_modules() if isinstance(module, FusedMember)]
    assert (logits(model) - logits(plain)).abs().max() < 0.01 * logits(plain).abs().max()
    gac.save(model, tmp_path / "saved")
    loaded: Any = gac.load(tmp_path / "saved", device="cpu")
    assert [name for name, one in stored_modules(loaded).items() if getattr(one, "shared", None)] == joined
    assert torch.equal(logits(loaded), logits(model))
    ours, theirs = load_file(tmp_path / "saved" / "model.safetensors"), plain.state_dict()
    assert all(torch.equal(theirs[name], one) for name, one in ours.items())


# --- what is refused ------------------------------------------------------------------------------------------------


OPTIONS = {"bits": 4, "group": 32, "zero": True}


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"storage": "pickle"}, "down_proj.storage is 'pickle'; expected one of PackedIntegers"),
        ({"storage": ["PackedIntegers"]}, r"gac: expected `str . null`, got `array` - at `.*storage`"),
        ({"options": {"bits": 4}}, r"options is {'bits': 4}; expected an object with bits, group, zero"),
        ({"options": OPTIONS | {"bits": 10**9}}, "options is .* which is not 1 to 8 bits"),
        ({"options": OPTIONS | {"group": 0}}, "options is .* which is not 1 to 8 bits"),
        ({"options": OPTIONS | {"zero": 1}}, "options is .* which is not 1 to 8 bits"),
    ],
)
def test_storages_that_are_none(described: dict[str, Any], message: str, model: Any) -> None:
    config = model.config
    config.gac = {**config.gac, "modules": {DOWN: config.gac["modules"][DOWN] | described}}
    with pytest.raises(ValueError, match=message):
        replace_weights(small_model(small_config("llama")), config)


def test_a_shared_gemm_of_stored_weights(saved: Path) -> None:
    edit(saved / "config.json", lambda config: config["gac"].update(fused=[[Q, K, V]]))
    with pytest.raises(ValueError, match=r"fused has .* expected lists of names of linear weights"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_a_model_that_is_not_the_plans(model: Any, tmp_path: Path) -> None:
    model.gac_plan = in_schemes(model.gac_plan, {DOWN: "w4a16:16"})
    with pytest.raises(CheckpointError, match=r"StoredLinear.* expected dense with dim 64 in w4a16:16, as model"):
        gac.save(model, tmp_path / "saved")


def test_what_cannot_read_it(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has weights in w3a16:32, w4a16:32; expected weights in 16 or 32 bits"):
        gac.repair(saved, tmp_path / "repaired", profile="nvidia-h100-80gb-hbm3")


Change = Callable[[Tensor], Tensor | None]
TO_DAMAGE = {
    Q: ("low_rank", 16, "w8a16"),
    K: ("dense", 64, "fp8"),
    V: ("dense", 64, "w8a8"),
    OUT: ("dense", 64, "nvfp4a16"),
    GATE: ("dense", 64, "fp8_block"),
    UP: ("dense", 64, "mxfp4a16"),
    DOWN: ("dense", 64, "w3a16:32"),
}
WAYS: dict[str, Any] = {"gac.load": gac.load, "import gac": AutoModelForCausalLM.from_pretrained}


@pytest.fixture(scope="module")
def original(make_plan: MakePlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "saved"
    gac.save(stored(small_llama(), make_plan, TO_DAMAGE), folder)
    (folder / DIGESTS).unlink()  # which would refuse all that follows for another reason
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Iterator[Path]:
    yield from copied(original, tmp_path)


def put(number: float) -> Change:
    """One of the numbers is another."""

    def change(one: Tensor) -> Tensor:
        one.view(-1)[5] = number
        return one

    return change


NO_SCALE = "holds 1 numbers that are no scales; expected finite ones above 0"
TENSORS: dict[str, tuple[str, Change, str]] = {
    "no number": (f"{DOWN}.weight_scale", put(float("nan")), NO_SCALE),
    "infinite": (f"{Q}.second.weight_scale", put(float("inf")), NO_SCALE),
    "zero": (f"{V}.weight_scale", put(0), NO_SCALE),
    "negative": (f"{K}.weight_scale", put(-0.5), NO_SCALE),
    "a block's scale": (f"{OUT}.weight_scale", put(-1), NO_SCALE),
    "a global scale": (f"{OUT}.weight_global_scale", put(float("nan")), NO_SCALE),
    "a power of two": (f"{UP}.weight_scale", put(255), NO_SCALE),
    "a scale of 128 rows": (f"{GATE}.weight_scale", lambda one: one * torch.tensor([[0.0], [1.0]]), NO_SCALE),
    "a weight that is no number": (f"{K}.weight", put(float("nan")), "holds 1 numbers that are not finite"),
    "a stated shape": (f"{DOWN}.weight_shape", lambda one: one + 1, r"is \[65, 177\]; expected \[64, 176\]"),
    "another length": (f"{DOWN}.weight_packed", lambda one: one[:, :-1].contiguous(), r"has shape \(64, 16\)"),
    "fewer numbers": (f"{V}.weight", lambda one: one[:-1].contiguous(), r"has shape \(63, 64\) .* expected \(64, 64\)"),
    "missing zero points": (f"{DOWN}.weight_zero_point", lambda _: None, "is missing"),
}
DTYPES: dict[str, tuple[str, Change, str]] = {
    "a dtype of scales": (f"{V}.weight_scale", lambda one: one.float(), "is of torch.float32; expected torch.float16"),
    "a dtype of numbers": (f"{V}.weight", lambda one: one.short(), "is of torch.int16; expected torch.int8"),
}
"""What transformers casts as it reads, and ``gac.load`` refuses."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [*TENSORS, *DTYPES])
def test_a_tensor(case: str, folder: Path) -> None:
    name, change, message = (TENSORS | DTYPES)[case]
    tensors = load_file(folder / "model.safetensors")
    new = change(tensors.pop(name))
    tensors |= {} if new is None else {name: new}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for load in WAYS.values() if case in TENSORS else (gac.load,):
        with pytest.raises((ValueError, CheckpointError), match=f"{name}.*{message}"):
            load(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": 16}, r"\.weight_(scale|zero_point) has shape"),
        ({"bits": 2}, r"\.weight_(packed|zero_point) has shape"),
        ({"zero": False}, r"\.weight_zero_point is unexpected"),
    ],
)
def test_an_option(options: dict[str, Any], message: str, folder: Path) -> None:
    edit(folder / "config.json", lambda config: config["gac"]["modules"][DOWN]["options"].update(options))
    for way, load in WAYS.items():
        due = f"has modules.{DOWN} .* as plan.json says" if way == "gac.load" else f"{DOWN}{message}"
        with pytest.raises((ValueError, CheckpointError), match=due):
            load(folder)
