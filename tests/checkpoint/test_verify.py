"""Digests of a checkpoint: what they cover, what they name, who writes them, and how they stand beside a signature."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import gac
from gac.core.errors import CheckpointError
from gac.core.untrusted import file_digest
from gac.runtime.contract import DIGESTS
from gac.runtime.model import CODE
from gac.runtime.plain import modeling_gac
from tests.checkpoint.conftest import edit
from tests.cli.commands import answer, refused, run
from tests.compression.applying import logits

FIRST = "model.layers.0.self_attn.q_proj.first.weight"
OWN = Path(modeling_gac.__file__).read_text()
EVIL = "raise SystemExit('the code was run')"


def test_everything_is_counted(saved: Path, model: Any) -> None:
    found, held = gac.verify(saved), load_file(saved / "model.safetensors")
    assert (found.tensors, found.bytes) == (len(held), sum(one.nbytes for one in held.values()))
    assert (found.planned_bytes, found.shape_bytes) == (model.gac_plan.model_bytes[0], 0)
    assert found.files == len({"plan.json", "generation_config.json", CODE})
    assert found.keys == len(json.loads((saved / "config.json").read_bytes())) - 5
    assert found.not_checked == ()
    assert gac.verify(str(saved)) == found
    assert torch.equal(logits(gac.load(saved, verify=True)), logits(model))


def test_shards_are_verified_with_their_index(model: Any, tmp_path: Path) -> None:
    gac.save(model, tmp_path / "saved", max_shard_size="100KB")
    assert "model.safetensors.index.json" in json.loads((tmp_path / "saved" / DIGESTS).read_bytes())["files"]
    gac.verify(tmp_path / "saved")
    gac.load(tmp_path / "saved")
    edit(tmp_path / "saved" / "model.safetensors.index.json", lambda index: index.update(metadata={}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json has the digest"):
        gac.load(tmp_path / "saved")


def test_the_tensor_and_the_key_that_differ_are_named(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors[FIRST].view(torch.int32)[0, 0] ^= 1
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"the values of {FIRST} have the digest .*; expected those that were"):
        gac.verify(saved)
    edit(saved / "config.json", lambda config: config.update(rms_norm_eps=0.01))
    with pytest.raises(CheckpointError, match=r"has rms_norm_eps '0\.01'; expected its value, as gac_digests\.json"):
        gac.load(saved)


def test_without_digests_it_is_opened_with_a_warning(saved: Path, model: Any, caplog: pytest.LogCaptureFixture) -> None:
    (saved / DIGESTS).unlink()
    assert torch.equal(logits(gac.load(saved)), logits(model))
    assert f"{saved} has no {DIGESTS}: that its files are what was saved cannot be checked" in caplog.text
    with pytest.raises(CheckpointError, match=f"has no {DIGESTS}; expected the digests that gac.save writes"):
        gac.load(saved, verify=True)


def test_what_is_saved_later_is_told_or_has_digests_of_its_own(saved: Path, tiny_tokenizer: Any, model: Any) -> None:
    tiny_tokenizer.save_pretrained(saved)
    assert gac.verify(saved).not_checked == ("tokenizer.json", "tokenizer_config.json")
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    model.save_pretrained(saved)
    gac.verify(saved)


def test_a_checkpoint_of_an_earlier_version_has_several_python_files(saved: Path, model: Any, tmp_path: Path) -> None:
    (saved / "modeling_gac.py").write_text("from .compressed import CompressedModel\n")
    (saved / "compressed.py").write_text(EVIL)
    code = {name: file_digest(saved / name) for name in ("modeling_gac.py", "compressed.py")}
    edit(saved / DIGESTS, lambda digests: digests["files"].update(code))
    for loaded in (gac.load(saved, verify=True), AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)):
        assert torch.equal(logits(loaded), logits(model))
    gac.save(loaded, tmp_path / "again")
    assert [file.name for file in (tmp_path / "again").glob("*.py")] == ["modeling_gac.py"]
    edit(saved / "config.json", lambda config: config["gac"].update(schema_version=2))
    with pytest.raises(CheckpointError, match=r"gac compress MODEL --plan .*plan\.json -o DIRECTORY"):
        gac.load(saved)


def test_only_gacs_own_code_is_copied_on(saved: Path, tmp_path: Path) -> None:
    for name in ("modeling_gac.py", "evil.py"):
        (saved / name).write_text(EVIL)
    with pytest.raises(CheckpointError, match=r"modeling_gac\.py has the digest .*; expected the file that was"):
        gac.repair(saved, tmp_path / "repaired")
    (saved / DIGESTS).unlink()
    assert gac.repair(saved, tmp_path / "repaired").left_out == ("evil.py",)
    loaded = gac.load(saved)
    gac.save(loaded, tmp_path / "again")
    loaded.save_pretrained(tmp_path / "by transformers")
    for folder in ("repaired", "again", "by transformers"):
        assert (tmp_path / folder / "modeling_gac.py").read_text() == OWN
        assert not (tmp_path / folder / "evil.py").exists()
        gac.verify(tmp_path / folder)


def test_keys_that_choose_code_do_not_reach_transformers(saved: Path) -> None:
    chosen = {f"{hidden}{what}_implementation": "evil/kernel" for hidden in ("", "_") for what in ("attn", "experts")}
    edit(saved / "config.json", lambda config: config.update(chosen))
    assert AutoConfig.from_pretrained(saved)._attn_implementation is None
    assert AutoModelForCausalLM.from_pretrained(saved).config._attn_implementation != "evil/kernel"
    chosen = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager")
    assert chosen.config._attn_implementation == "eager"


def test_the_command(saved: Path, tmp_path: Path) -> None:
    found = answer("verify", saved)
    assert found["digest"] in run("verify", saved).output
    assert (found["directory"], found["not_checked"]) == (str(saved), [])
    (saved / "extra.py").write_text("")
    assert "extra.py was not there when it was saved; expected no other code" in refused("verify", saved)
    assert "has no config.json with a key gac" in refused("verify", tmp_path)
