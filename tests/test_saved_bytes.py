"""What is saved has the bytes that the plan says, whatever dtype it was computed in."""

import copy
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import gac
import gac.measurement.session
from gac.core.errors import ModelError
from gac.models.rotation import rotate
from gac.plan.plan import Plan
from tests.cli.commands import answer, run
from tests.compression.applying import logits
from tests.models.small import small_config, small_model
from tests.small_pipeline import Small

ASKED: dict[str, dict[str, Any]] = {
    "16 bits": {"budget": 0.7},
    "few bits": {"memory": 0.4, "schemes": ("bf16", "w8a16", "w4a16:32", "w8a8")},
    "few bits, head too": {"memory": 0.4, "schemes": ("bf16", "w4a16"), "head": "w8a16"},
    "rotated": {"memory": 0.4, "schemes": ("w4a16:32",), "rotate": True},
}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def packaged(request: pytest.FixtureRequest, small: Small) -> Small:
    """A model in float32 that goes by the name of a packaged one."""
    model = small_model(small_config("llama", tie_word_embeddings=request.param))
    model.config.name_or_path = model.name_or_path = "smollm2"
    return Small(model, small.tokenizer, small.text)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint but those that say sizes; its file holds them and a header, and nothing else."""
    file = folder / "model.safetensors"
    found = load_file(file)
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size == header + sum(one.nbytes for one in found.values())
    return {name: one for name, one in found.items() if not name.endswith("weight_shape")}


def bytes_in(folder: Path) -> int:
    return sum(one.nbytes for one in tensors_in(folder).values())


def allocated(asked: Small, options: dict[str, Any]) -> Plan:
    return asked.allocate(options.get("budget"), **{name: one for name, one in options.items() if name != "budget"})


@pytest.mark.parametrize("options", ASKED.values(), ids=ASKED)
def test_a_packaged_model_is_saved_in_16_bits(packaged: Small, options: dict[str, Any], tmp_path: Path) -> None:
    plan = allocated(packaged, options)
    small, again = packaged.there_and_back(plan, tmp_path, copy.deepcopy(packaged.model))
    folder = tmp_path / "small"
    assert bytes_in(folder) == plan.model_bytes[0] == gac.verify(folder).bytes - 16 * sizes_in(folder)
    assert small.dtype == again.dtype == torch.bfloat16
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(logits(again), logits(small))
    assert f"{plan.model_bytes[0]:,} of" in (folder / "README.md").read_text()
    assert packaged.model.dtype == torch.float32


def sizes_in(folder: Path) -> int:
    """How many tensors say sizes."""
    return sum(name.endswith("weight_shape") for name in load_file(folder / "model.safetensors"))


@pytest.mark.parametrize(("dtype", "asked"), [(torch.bfloat16, None), (torch.float32, torch.bfloat16)])
def test_a_model_in_16_bits_or_made_so_has_the_bytes_of_its_plan(
    dtype: torch.dtype, asked: torch.dtype | None, small: Small, tmp_path: Path
) -> None:
    config = small_config("llama")
    config.dtype = dtype
    own = Small(small_model(config), small.tokenizer, small.text)
    plan = allocated(own, ASKED["few bits"])
    made = own.compress(plan, dtype=asked)
    gac.save(made, tmp_path / "small", tokenizer=own.tokenizer)
    assert bytes_in(tmp_path / "small") == plan.model_bytes[0]
    assert torch.equal(logits(gac.load(tmp_path / "small", device="cpu")), logits(made.cpu()))


def test_a_model_in_32_bits_stays_so_and_its_card_says_it(small: Small, tmp_path: Path) -> None:
    plan = allocated(small, ASKED["16 bits"])
    small.there_and_back(plan, tmp_path)
    assert bytes_in(tmp_path / "small") == 2 * plan.model_bytes[0]
    assert "take 4 bytes here; the bytes below count 2 for each" in (tmp_path / "small" / "README.md").read_text()


def test_a_packaged_model_can_be_kept_in_32_bits(packaged: Small, tmp_path: Path) -> None:
    plan = allocated(packaged, ASKED["16 bits"])
    made = packaged.compress(plan, dtype=torch.float32)
    gac.save(made, tmp_path / "small", tokenizer=packaged.tokenizer)
    assert {one.dtype for one in tensors_in(tmp_path / "small").values()} == {torch.float32}


def test_other_dtypes_are_refused(small: Small) -> None:
    plan = allocated(small, ASKED["16 bits"])
    with pytest.raises(ModelError, match=r"dtype=torch.int8; expected torch.bfloat16 or torch.float32"):
        small.compress(plan, dtype=torch.int8)


def test_16_bits_cost_next_to_nothing(packaged: Small, tmp_path: Path) -> None:
    plan = allocated(packaged, ASKED["16 bits"])
    wide, narrow = (
        packaged.compress(plan, copy.deepcopy(packaged.model), dtype=dtype) for dtype in (torch.float32, None)
    )
    apart = (logits(narrow).float() - logits(wide)).norm() / logits(wide).norm()
    assert 0 < apart < 0.02


def test_what_is_exported_is_in_16_bits_too(packaged: Small, tmp_path: Path) -> None:
    plan = allocated(packaged, ASKED["16 bits"])
    gac.export(packaged.compress(plan), tmp_path / "small", merge=True, tokenizer=packaged.tokenizer)
    assert bytes_in(tmp_path / "small") == plan.model_bytes[1]


def test_models_are_compared_in_one_dtype(packaged: Small, tmp_path: Path) -> None:
    packaged.there_and_back(allocated(packaged, ASKED["16 bits"]), tmp_path, copy.deepcopy(packaged.model))
    given = {"text": str(packaged.text), "windows": 1, "length": 32, "tokenizer": packaged.tokenizer}
    measured = gac.evaluate(tmp_path / "small", against=packaged.model, **given)
    assert [one.dtype for one in (*measured.models, measured.against) if one] == ["float32"] * 2
    assert gac.evaluate(tmp_path / "small", **given).models[0].dtype == "bfloat16"


# --- one copy of the weights ----------------------------------------------------------------------------------------


def test_the_command_keeps_no_second_copy_of_a_rotated_model(
    directory: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (
        "--budget",
        "1",
        "--memory",
        "0.4",
        "--scheme",
        "w4a16:32",
        "--rotate",
        "--calibration",
        f"{text_file}:4x32",
    )
    assert run("allocate", directory, *options, "-o", tmp_path / "plan.json").exit_code == 0
    left: list[int] = []

    def counted(model: Any) -> Any:
        before = [weakref.ref(one) for name, one in model.named_parameters() if "proj" in name or "embed" in name]
        found = rotate(model)
        gc.collect()
        left.append(sum(one() is not None for one in before))
        return found

    monkeypatch.setattr(gac.measurement.session, "rotate", counted)
    answer("compress", directory, "--plan", tmp_path / "plan.json", "-o", tmp_path / "small")
    assert left == [0]
