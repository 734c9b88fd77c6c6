"""A small compressed Llama, and its checkpoint."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import gac
from gac.plan.plan import Plan
from tests.compression.compressed import compressed

COMPANIONS = ("plan.json", "README.md", "modeling_gac.py")
"""Files of a checkpoint that transformers knows nothing of."""
CHANGES = {
    "model.layers.0.self_attn.q_proj": ("low_rank", 8),
    "model.layers.0.mlp.down_proj": ("low_rank", 16),
    "model.layers.1.mlp.gate_proj": ("narrow", 96),
    "model.layers.1.mlp.up_proj": ("narrow", 96),
    "model.layers.1.mlp.down_proj": ("narrow", 96),
}


@pytest.fixture
def model(tiny_model: LlamaForCausalLM, make_plan: Callable[..., Plan]) -> Any:
    return compressed(tiny_model, make_plan, CHANGES)


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> Path:
    gac.save(model, tmp_path / "saved")
    return tmp_path / "saved"


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a JSON file."""
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))


def copied(original: Path, folder: Path) -> Iterator[Path]:
    """A copy of a checkpoint that a test may change."""
    yield Path(shutil.copytree(original, folder / "changed"))
    shutil.rmtree(folder / "changed")
