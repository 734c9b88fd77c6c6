"""No file that GAC opens can run code, and none leads out of its directory."""

import ast
import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaConfig

import gac
from gac.core.errors import CheckpointError, ModelError
from gac.core.untrusted import check_inside
from gac.models.loading import load_config, load_model
from gac.plan.plan import Plan
from gac.profiling.table import Profile
from tests.changed import edited
from tests.compression.compressed import MakePlan
from tests.fuzz.make_corpus import header_files
from tests.sources import nodes

DANGEROUS = re.compile(
    r"(pickle|cPickle|_pickle|dill|cloudpickle|joblib|shelve|marshal|yaml)(\.\w+)*|(eval|exec|compile|__import__)\(\)"
    r"|(torch\.load|np\.fromfile|os\.system|os\.popen)\(\)|allow_pickle=(?!False|allow_pickle).*|shell=(?!False).*"
)
"""Modules that are imported, functions that are called, and arguments other than those that are safe."""
EXCEPTIONS = {
    "repairs/weight_files.py": {"pickle", "torch.load()"},  # others' checkpoints, where asked for, weights only
    "evaluation/tasks.py": {"yaml"},  # by safe_load
}


def danger(node: ast.AST) -> list[str]:
    """What in a node could run what it reads."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [str(node.module)]
    elif isinstance(node, ast.Call):
        keywords = (f"{keyword.arg}={ast.unparse(keyword.value)}" for keyword in node.keywords)
        names = [f"{ast.unparse(node.func)}()", *keywords]
    return [name for name in names if DANGEROUS.fullmatch(name)]


def test_no_module_can_run_what_it_reads_and_exceptions_read_data_alone() -> None:
    dangers = {(path, name) for path, node in nodes() for name in danger(node)}
    assert {(path, name) for path, name in dangers if name not in EXCEPTIONS.get(path, ())} == set()
    called = [ast.unparse(node) for path, node in nodes() if path in EXCEPTIONS and isinstance(node, ast.Call)]
    loads = [call for call in called if call.startswith(("torch.load", "pickle.", "yaml."))]
    assert sorted(call.partition("(")[0] for call in loads) == ["torch.load", "yaml.safe_load"]
    assert all("weights_only=True" in call for call in loads if call.startswith("torch.load"))


def test_the_check_finds_what_it_looks_for() -> None:
    for code in ("import pickle", "torch.load(f)", "np.load(f, allow_pickle=True)", "eval(x)", "from yaml import load"):
        assert len([name for node in ast.walk(ast.parse(code)) for name in danger(node)]) == 1


def test_code_of_a_model_is_never_asked_for() -> None:
    keywords = (node for _, node in nodes() if isinstance(node, ast.keyword) and node.arg == "trust_remote_code")
    assert {ast.unparse(keyword.value) for keyword in keywords} == {"False"}


@pytest.fixture
def no_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, Mock(side_effect=AssertionError("a pickle is read")))


@pytest.fixture
def plan(tiny_config: LlamaConfig, make_plan: MakePlan) -> Plan:
    return make_plan(tiny_config, {"model.layers.0.self_attn.q_proj": ("low_rank", 24)})


@pytest.fixture
def folder(plan: Plan, tmp_path: Path, tiny_config: LlamaConfig) -> Path:
    """A checkpoint's files, but for its weights."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name, text in zip(("plan.json", "config.json"), header_files(tiny_config, plan), strict=True):
        (folder / name).write_text(text)
    return folder


@pytest.mark.usefixtures("no_pickles")
def test_readers_read_no_pickles(folder: Path, plan: Plan) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    assert Plan.load(folder / "plan.json") == plan
    assert len(Profile.load("nvidia-h100-80gb-hbm3").measurements) > 10_000
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        gac.load(folder)


@pytest.mark.parametrize("name", ["plan.json", "config.json", "model.safetensors", "tokenizer.json"])
def test_a_symlink_that_leads_out_is_not_followed(folder: Path, name: str) -> None:
    outside = folder.parent / "outside"
    if (folder / name).exists():
        shutil.move(folder / name, outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{name} is a symlink to {outside}, outside of the directory"):
        gac.load(folder)


def test_symlinks_within_the_directory_and_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    revision = tmp_path / "snapshots" / "0a1b"
    for place in (revision, tmp_path / "blobs"):
        place.mkdir(parents=True)
    (tmp_path / "blobs" / "1234").touch()
    (revision / "inside").symlink_to(revision / "config.json")
    (revision / "config.json").symlink_to(Path("../../blobs/1234"))
    check_inside(revision, CheckpointError)


@pytest.mark.parametrize("layers", [2**53, 0, "2", None])
def test_a_number_of_layers_that_cannot_be_is_refused(folder: Path, layers: Any) -> None:
    with edited(folder / "config.json") as config:
        config["num_hidden_layers"] = layers
    with pytest.raises(CheckpointError, match=f"num_hidden_layers is {layers}, and not from 1 to 4,096; expected"):
        gac.load(folder)


@pytest.mark.parametrize(("model_type", "name"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer")])
def test_a_dense_model_of_too_many_layers_is_refused_at_once(model_type: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, name: 2**40}))
    for load in (load_config, load_model):
        with pytest.raises(ModelError, match=f"cannot be loaded: {name} is 1099511627776, and not from 1 to 4,096;"):
            load(str(tmp_path))
