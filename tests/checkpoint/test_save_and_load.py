"""Compressed models, saved and loaded: the same bits, there whole or not at all, and contradictions are refused."""

import importlib
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import gac
from gac.checkpoint.files import ATTEMPTS, read_unreplaced
from gac.checkpoint.header import _digest, digest_of, is_unchanged
from gac.core.errors import CheckpointError, GacError
from gac.models.loading import load_model
from gac.runtime.contract import DIGESTS, SCHEMA
from tests.checkpoint.conftest import CHANGES, COMPANIONS, edit
from tests.compression.applying import logits
from tests.compression.compressed import compressed

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 128, "rope_theta": 500000.0}


TIED = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize(("changed", "dtype"), [(TIED, torch.float32), ({"rope_parameters": LLAMA3}, torch.bfloat16)])
def test_any_llama_comes_back(changed: Any, dtype: Any, tiny_config: Any, make_plan: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**(tiny_config.to_dict() | changed))
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    dense = LlamaForCausalLM.from_pretrained(tmp_path / "dense", dtype=dtype)
    model = compressed(dense, make_plan, CHANGES)
    gac.save(model, tmp_path / "saved")
    loaded = gac.load(tmp_path / "saved")
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert torch.equal(logits(loaded), logits(model))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == config.tie_word_embeddings


def test_generation_config_and_tokenizer_are_saved(model: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    model.generation_config.max_new_tokens = 7
    gac.save(model, tmp_path / "saved", tokenizer=tiny_tokenizer)
    loaded = gac.load(tmp_path / "saved")
    assert loaded.generation_config.max_new_tokens == 7
    assert load_model(loaded).tokenizer("rank")["input_ids"] == tiny_tokenizer("rank")["input_ids"]


def test_the_directory_holds_no_pickles(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        DIGESTS,
        *COMPANIONS,
    }
    assert saved.stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_config_names_every_form_and_dim(saved: Path) -> None:
    header = json.loads((saved / "config.json").read_text())["gac"]
    assert header["schema_version"] == SCHEMA
    assert {name: (one["form"], one["dim"]) for name, one in header["modules"].items()} == CHANGES
    assert header["modules"]["model.layers.0.self_attn.q_proj"] == {
        "form": "low_rank",
        "dim": 8,
        "module": "LowRankLinear",
        "scheme": "bf16",
        "sizes": {"in_features": 64, "rank": 8, "out_features": 64},
    }
    assert header["fused"] == []
    assert header["decode_kernel"] == "torch"


def test_the_card_says_how_to_load_and_to_reproduce(saved: Path, model: LlamaForCausalLM) -> None:
    card = (saved / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- gac\n---\n")
    assert model.gac_plan.summary() in card
    assert 'gac.load("this directory")' in card
    assert "gac compress tiny --plan plan.json -o DIR" in card
    assert f"With GAC {gac.__version__} and the profile `222222222222` of the NVIDIA H100 80GB HBM3" in card


@pytest.mark.parametrize("write", [gac.save, gac.export])
def test_a_model_without_a_plan_is_not_written(write: Any, tiny_model: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^a LlamaForCausalLM without a plan; expected a model from gac"):
        write(tiny_model, tmp_path / "saved")


def test_a_model_that_left_its_plan_or_has_mixed_dtypes_is_not_saved(model: Any, tmp_path: Path) -> None:
    layer, o_proj = model.model.layers[1].self_attn, model.model.layers[1].self_attn.o_proj
    layer.o_proj = torch.nn.Linear(64, 60, bias=False)
    with pytest.raises(CheckpointError, match=r"1\.self_attn\.o_proj is Linear\(.*; expected dense with dim 64"):
        gac.save(model, tmp_path / "saved")
    layer.o_proj = o_proj.to(torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"in torch\.bfloat16 and torch\.float32; expected one dtype"):
        gac.save(model, tmp_path / "saved")


def test_a_tensor_that_transformers_leaves_out_is_named(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_keys_to_ignore_on_save", ["model.norm.weight"])
    expected = r"transformers wrote nothing for model.norm.weight; expected \(64,\) in torch.float32"
    with pytest.raises(CheckpointError, match=expected):
        gac.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("nowhere", "config.json", "."):
        with pytest.raises(CheckpointError, match=f"^{tmp_path / name} has no config.json with a key gac; expected a"):
            gac.load(tmp_path / name)


Q_PROJ = "model.layers.0.self_attn.q_proj"


def q_proj(**changed: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: header["modules"][Q_PROJ].update(changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (q_proj(dim=8.0), f'config.json has modules.{Q_PROJ} {{"dim": 8.0, '),
        (q_proj(code="x"), f'config.json has modules.{Q_PROJ} {{"code": "x", '),
        (lambda header: header["modules"].pop(Q_PROJ), f"config.json has modules.{Q_PROJ} missing; expected {{"),
        (lambda header: header["modules"].update(a={}), "config.json has modules.a {}; expected none, as plan.json"),
        (lambda header: header.update(decode_kernel="triton"), 'decode_kernel "triton"; expected "torch", as plan'),
        (lambda header: header.update(code="x"), 'config.json has code "x"; expected none, as plan.json says'),
        (lambda header: header.clear(), f"key gac: schema version None; expected version {SCHEMA}"),
    ],
)
def test_a_header_that_is_not_the_plans_is_refused(change: Any, message: str, saved: Path) -> None:
    edit(saved / "config.json", lambda config: change(config["gac"]))
    with pytest.raises(CheckpointError) as caught:
        gac.load(saved)
    assert message in str(caught.value)


def test_the_plan_is_read_when_asked_for(model: Any, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    monkeypatch.setattr("gac.checkpoint.load.agreed_plan", lambda *_: read.append(1))
    loaded = gac.load(saved)
    assert not read
    assert "_gac_plan" not in vars(loaded)
    assert loaded.gac_plan == model.gac_plan


def test_what_the_digest_covers_and_a_checkpoint_without_one(saved: Path, model: LlamaForCausalLM) -> None:
    edit(saved / "config.json", lambda config: config.update(use_cache=False, bos_token_id=3))
    loaded = gac.load(saved)
    assert is_unchanged(loaded.config.gac, loaded.config)
    assert not is_unchanged(loaded.config.gac | {"fused": [["a", "b"]]}, loaded.config)
    loaded.config.num_key_value_heads = 1
    assert not is_unchanged(loaded.config.gac, loaded.config)
    edit(saved / "config.json", lambda config: config["gac"].pop("digest"))
    (saved / DIGESTS).unlink()
    loaded = gac.load(saved)
    assert vars(loaded)["_gac_plan"] == model.gac_plan
    assert torch.equal(logits(loaded), logits(model))


def rewrite(saved: Path, header: Callable[[dict[str, Any]], Any], plan: tuple[str, str] = ("", "")) -> None:
    """Change the header or the plan on purpose: they contradict one another, and the digests in it fit."""
    (saved / DIGESTS).unlink()
    config = gac.load(saved).config
    text = (saved / "plan.json").read_text().replace(*plan, 1)
    (saved / "plan.json").write_text(text)
    changed = json.loads((saved / "config.json").read_bytes())["gac"] | {"plan": digest_of(text)}
    header(changed)
    changed["digest"] = _digest(changed, config)
    edit(saved / "config.json", lambda document: document.update(gac=changed))


def test_a_contradiction_with_a_fitting_digest_is_refused_with_the_plan(saved: Path, tmp_path: Path) -> None:
    rewrite(saved, q_proj(dim=9))
    loaded = gac.load(saved)
    with pytest.raises(CheckpointError, match=rf"config.json has modules.{Q_PROJ} {{\"dim\": 9, .*expected"):
        gac.save(loaded, tmp_path / "again")


@pytest.mark.parametrize(("old", "new"), [('"used": ', '"used": 1'), ('"shots"', '"shot"'), ("{", "[")])
def test_a_plan_with_a_fitting_digest_is_read_strictly(old: str, new: str, saved: Path) -> None:
    rewrite(saved, lambda _: None, (old, new))
    loaded = gac.load(saved)
    with pytest.raises(CheckpointError, match="Save the model again"):
        _ = loaded.gac_plan


def test_a_header_with_a_fitting_digest_is_built_as_strictly(saved: Path) -> None:
    rewrite(saved, q_proj(module="Evil"))
    with pytest.raises(CheckpointError, match="module is 'Evil'; expected one of Linear"):
        gac.load(saved)


def test_shards_come_back_and_a_single_file_replaces_them(model: Any, tmp_path: Path) -> None:
    for place, size in (("saved", "100KB"), ("shards", "60KB"), ("shards", "5GB")):
        model.save_pretrained(tmp_path / place, max_shard_size=size)
        assert torch.equal(logits(gac.load(tmp_path / place)), logits(model))
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    next((tmp_path / "saved").glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"model-0.*\.safetensors is missing; expected every file"):
        gac.load(tmp_path / "saved")


def test_code_in_the_directory_is_refused_not_run(saved: Path, tmp_path: Path) -> None:
    (saved / "configuration_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    auto_map = {"AutoConfig": "configuration_evil.Config", "AutoModelForCausalLM": "configuration_evil.Model"}
    edit(saved / "config.json", lambda config: config.update(auto_map=auto_map))
    AutoModelForCausalLM.from_pretrained(saved).save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_bytes())["auto_map"] == {}
    assert not (tmp_path / "ran").exists()


def test_a_process_without_its_run_saves_nothing(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for processes, message in (("two", "the environment variable WORLD_SIZE="), ("8", "8 processes that do not find")):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", processes)
        with pytest.raises(GacError, match=f"^{message}"):
            gac.save(model, tmp_path / "saved")


def test_a_directory_in_use_is_left_alone_but_where_it_may_be_replaced(model: LlamaForCausalLM, saved: Path) -> None:
    (saved / "mine").write_text("kept")
    with pytest.raises(CheckpointError, match=f"{saved} holds a compressed checkpoint; .* overwrite=True"):
        gac.save(model, saved)
    assert (saved / "mine").exists()
    (saved / "old").write_text("gone")
    torch.nn.init.ones_(model.lm_head.weight)
    gac.save(model, saved, overwrite=True)
    assert torch.equal(logits(gac.load(saved)), logits(model))
    assert not (saved / "old").exists()
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


@pytest.mark.parametrize("killed", [False, True])
def test_the_old_is_kept_where_replacing_fails(killed: bool, model: Any, saved: Path, monkeypatch: Any) -> None:
    """A killed process leaves the old checkpoint under its backup name."""
    rename, before = Path.rename, {path.name: path.read_bytes() for path in saved.iterdir()}

    def fail(path: Path, target: Path) -> Path:
        if path.suffix == ".part":
            raise KeyboardInterrupt if killed else OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(KeyboardInterrupt if killed else CheckpointError):
        gac.save(model, saved, overwrite=True)
    [left] = saved.parent.iterdir()
    assert (left.suffix == ".old") if killed else (left == saved)
    assert {path.name: path.read_bytes() for path in left.iterdir()} == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_checkpoint_is_never_replaced(model: LlamaForCausalLM, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.tex").write_text("kept")
    for target in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(CheckpointError, match=f"{target} exists and is no compressed checkpoint; expected a new"):
            gac.save(model, target, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_link_to_an_empty_directory_is_followed(model: LlamaForCausalLM, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    gac.save(model, tmp_path / "link")
    gac.load(tmp_path / "saved")
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "saved"]


@pytest.fixture(params=["weights", "move"])
def full_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file of the process may grow beyond 64 kB, so weights cannot be written; or the last step fails."""

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if request.param == "move":
        monkeypatch.setattr("gac.checkpoint.target._move", Mock(side_effect=OSError(28, "No space left on device")))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_failure_leaves_nothing_behind(model: LlamaForCausalLM, saved: Path, full_disk: None) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(CheckpointError, match=f"^{saved} cannot be written: "):
        gac.save(model, saved, overwrite=True)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


def test_a_name_that_is_not_utf8_is_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="its name is not UTF-8"):
        gac.save(model, tmp_path / "small-\udcff")
    assert not list(tmp_path.iterdir())


loading = importlib.import_module("gac.checkpoint.load")


def when_called(monkeypatch: pytest.MonkeyPatch, name: str, times: int, action: Callable[[], Any]) -> None:
    """Do something before a step of loading, the first times that it is taken."""
    step, left = getattr(loading, name), [None] * times

    def stepped(*given: Any, **options: Any) -> Any:
        if left:
            left.pop()
            action()
        return step(*given, **options)

    monkeypatch.setattr(loading, name, stepped)


@pytest.mark.parametrize(("step", "verify"), [("plan_text", False), ("weight_files", True), ("open_tensors", False)])
def test_what_is_replaced_is_loaded_whole(step: str, verify: bool, model: Any, saved: Path, monkeypatch: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    when_called(monkeypatch, step, 1, lambda: gac.save(model, saved, overwrite=True))
    assert torch.equal(logits(gac.load(saved, verify=verify)), logits(model))


def test_a_directory_that_is_always_replaced_is_named(saved: Path, tmp_path: Path) -> None:
    other = shutil.copytree(saved, tmp_path / "other")
    read: list[int] = []

    def replacing() -> None:
        read.append(1)
        saved.rename(tmp_path / "old")
        other.rename(saved)
        (tmp_path / "old").rename(other)

    with pytest.raises(CheckpointError, match=rf"^{saved} was replaced while it was read \(5 of 5 times\)"):
        read_unreplaced(saved, replacing)
    assert len(read) == ATTEMPTS
