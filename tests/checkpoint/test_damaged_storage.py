"""Damaged tensors and options of stored weights: refused by name, whoever opens the checkpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import gac
from gac.core.errors import CheckpointError
from gac.runtime.contract import DIGESTS
from tests.checkpoint.conftest import copied, edit
from tests.compression.compressed import MakePlan
from tests.compression.stored import stored
from tests.models.small import small_config, small_model

Change = Callable[[Tensor], Tensor | None]
Q, K, V, DOWN = (
    f"model.layers.{name}_proj" for name in ("0.self_attn.q", "0.self_attn.k", "0.self_attn.v", "1.mlp.down")
)
CHOSEN = {
    Q: ("low_rank", 16, "w8a16"),
    K: ("dense", 64, "fp8"),
    V: ("dense", 64, "w8a8"),
    DOWN: ("dense", 64, "w3a16:32"),
}


WAYS: dict[str, Callable[[Path], Any]] = {
    "gac.load": gac.load,
    "import gac": AutoModelForCausalLM.from_pretrained,
}


@pytest.fixture(scope="module")
def original(make_plan: MakePlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config("llama")
    config.dtype = torch.bfloat16
    folder = tmp_path_factory.mktemp("original") / "saved"
    gac.save(stored(small_model(config), make_plan, CHOSEN), folder)
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


def write(folder: Path, name: str, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    new = change(tensors.pop(name))
    changed = {} if new is None else {name: new}
    save_file(tensors | changed, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [*TENSORS, *DTYPES])
def test_a_tensor(case: str, folder: Path) -> None:
    name, change, message = (TENSORS | DTYPES)[case]
    write(folder, name, change)
    for load in WAYS.values() if case in TENSORS else (gac.load,):
        with pytest.raises((ValueError, CheckpointError), match=f"{name}.*{message}"):
            load(folder)


OPTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "smaller groups": (DOWN, {"group": 16}, r"\.weight_(scale|zero_point) has shape"),
    "fewer bits": (DOWN, {"bits": 2}, r"\.weight_(packed|zero_point) has shape"),
    "no zero points": (DOWN, {"zero": False}, r"\.weight_zero_point is unexpected"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "options", "message"), OPTIONS.values(), ids=OPTIONS.keys())
def test_an_option(name: str, options: dict[str, Any], message: str, folder: Path) -> None:
    edit(folder / "config.json", lambda config: config["gac"]["modules"][name]["options"].update(options))
    for way, load in WAYS.items():
        due = f"has modules.{name} .* as plan.json says" if way == "gac.load" else f"{name}{message}"
        with pytest.raises((ValueError, CheckpointError), match=due):
            load(folder)
