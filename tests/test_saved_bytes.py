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
from gac.core.errors import ModelError
from gac.models.rotation import rotate
from tests.cli.commands import answer, run
from tests.compression.applying import logits
from tests.models.small import small_config, small_model
from tests.small_pipeline import Small

ASKED: dict[str, dict[str, Any]] = {
    "16 bits": {"budget": 0.7},
    "few bits": {"budget": None, "memory": 0.4, "schemes": ("bf16", "w8a16", "w4a16:32", "w8a8")},
    "few bits, head too": {"budget": None, "memory": 0.4, "schemes": ("bf16", "w4a16"), "head": "w8a16"},
    "rotated": {"budget": None, "memory": 0.4, "schemes": ("w4a16:32",), "rotate": True},
    "rotated, head too": {"budget": None, "memory": 0.6, "schemes": ("w8a16",), "rotate": True, "head": "w8a16"},
}


def packaged_model(small: Small, tied: bool = True) -> Small:
    """A model in float32 that goes by the name of a packaged one."""
    model = small_model(small_config("llama", tie_word_embeddings=tied, num_hidden_layers=1))
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


@pytest.mark.parametrize(("asked", "tied"), [*zip(ASKED, (True, False, False, True, True), strict=True)])
def test_a_packaged_model_is_saved_in_16_bits(asked: str, tied: bool, small: Small, tmp_path: Path) -> None:
    packaged = packaged_model(small, tied)
    plan = packaged.allocate(**ASKED[asked])
    compressed, again = packaged.there_and_back(plan, tmp_path, copy.deepcopy(packaged.model))
    folder = tmp_path / "small"
    sizes = sum(name.endswith("weight_shape") for name in load_file(folder / "model.safetensors"))
    assert bytes_in(folder) == plan.model_bytes[0] == gac.verify(folder).bytes - 16 * sizes
    assert compressed.dtype == again.dtype == torch.bfloat16
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert f"{plan.model_bytes[0]:,} of" in (folder / "README.md").read_text()
    assert packaged.model.dtype == torch.float32


def test_models_made_or_kept_in_other_bits_have_the_bytes_of_their_plans(small: Small, tmp_path: Path) -> None:
    config = small_config("llama", num_hidden_layers=1)
    config.dtype = torch.float32
    pipeline = Small(small_model(config), small.tokenizer, small.text)
    plan = pipeline.allocate(**ASKED["few bits"])
    compressed = pipeline.compress(plan, dtype=torch.bfloat16)
    gac.save(compressed, tmp_path / "made", tokenizer=pipeline.tokenizer)
    assert bytes_in(tmp_path / "made") == plan.model_bytes[0]
    assert torch.equal(logits(gac.load(tmp_path / "made", device="cpu")), logits(compressed.cpu()))
    plan = small.allocate(0.7)
    small.there_and_back(plan, tmp_path)
    assert bytes_in(tmp_path / "small") == 2 * plan.model_bytes[0]
    assert "take 4 bytes here; the bytes below count 2 for each" in (tmp_path / "small" / "README.md").read_text()


def test_a_packaged_model_can_be_kept_in_32_bits(small: Small, tmp_path: Path) -> None:
    packaged = packaged_model(small)
    plan = packaged.allocate(0.7)
    with pytest.raises(ModelError, match=r"dtype=torch.int8; expected torch.bfloat16 or torch.float32"):
        packaged.compress(plan, dtype=torch.int8)
    dtypes = torch.float32, None
    wide, narrow = (packaged.compress(plan, copy.deepcopy(packaged.model), dtype=dtype) for dtype in dtypes)
    assert 0 < (logits(narrow).float() - logits(wide)).norm() / logits(wide).norm() < 0.02
    gac.save(wide, tmp_path / "small", tokenizer=packaged.tokenizer)
    assert {values.dtype for values in tensors_in(tmp_path / "small").values()} == {torch.float32}
    options = {"text": str(packaged.text), "windows": 1, "length": 32, "tokenizer": packaged.tokenizer}
    gac.save(narrow, tmp_path / "narrow", tokenizer=packaged.tokenizer)
    measured = gac.evaluate(tmp_path / "narrow", against=packaged.model, **options)  # in one dtype
    assert [one.dtype for one in (*measured.models, measured.against) if one] == ["float32"] * 2
    assert gac.evaluate(tmp_path / "narrow", **options).models[0].dtype == "bfloat16"
    gac.export(narrow, tmp_path / "merged", merge=True, tokenizer=packaged.tokenizer)
    assert bytes_in(tmp_path / "merged") == plan.model_bytes[1]


def test_no_second_copy_is_rotated(directory: Path, text_file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    options = ["--budget", "1", "--memory", "0.4", "--scheme", "w4a16:32", "--rotate", "--calibration"]
    command = ("allocate", directory, *options, f"{text_file}:4x32", "-o", tmp_path / "plan.json")
    assert run(*command).exit_code == 0
    left: list[int] = []

    def counted(model: Any) -> Any:
        before = [weakref.ref(one) for name, one in model.named_parameters() if "proj" in name or "embed" in name]
        found = rotate(model)
        gc.collect()
        left.append(sum(one() is not None for one in before))
        return found

    monkeypatch.setattr("gac.models.rotation.rotate", counted)
    answer("compress", directory, "--plan", tmp_path / "plan.json", "-o", tmp_path / "small")
    assert left == [0]
