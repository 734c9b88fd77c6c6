"""What users of transformers do with a model, done with a compressed one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM, pipeline
from transformers.utils import hub

import gac
from gac.core.errors import CheckpointError
from gac.runtime.contract import DIGESTS
from gac.runtime.model import CompressedModel
from gac.runtime.modules import LowRankLinear
from tests.checkpoint.conftest import CHANGES, COMPANIONS
from tests.compression.applying import IDS, logits
from tests.compression.compressed import MakePlan, small_compressed

Q_PROJ = "model.layers.0.self_attn.q_proj"
ON_CPU = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
PLACES = dict.fromkeys(ON_CPU, "cpu") | {"model.layers.1": "disk"}


def test_it_is_a_model_of_its_architecture_in_any_dtype(model: Any, saved: Path) -> None:
    assert isinstance(model, LlamaForCausalLM)
    assert isinstance(model, CompressedModel)
    assert model.config.model_type == "gac_llama"
    assert model.model.config is model.config
    loaded, report = AutoModelForCausalLM.from_pretrained(saved, dtype="bfloat16", output_loading_info=True)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert not report["missing_keys"]
    assert gac.load(saved, dtype=torch.float16).dtype == torch.float16


def offloaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, device_map=PLACES, offload_folder=folder.parent / "offloaded")


def test_weights_can_stay_on_disk(saved: Path, model: Any) -> None:
    loaded = offloaded(saved)
    assert loaded.get_parameter("model.layers.1.mlp.down_proj.weight").is_meta
    assert torch.equal(logits(loaded), logits(model))


def test_offloaded_weights_are_not_fused(make_plan: MakePlan, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fused = small_compressed("llama", make_plan, fused=True)
    fused.save_pretrained(tmp_path / "saved")
    loaded = offloaded(tmp_path / "saved")
    assert "run by themselves: they are quantised or offloaded" in caplog.text
    assert (logits(loaded) - logits(fused)).abs().max() < 1e-5


def test_it_can_be_built_from_its_config_and_opened_without_a_head(saved: Path, model: Any) -> None:
    config = AutoConfig.from_pretrained(saved)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    assert empty.get_parameter(f"{Q_PROJ}.first.weight").shape == (CHANGES[Q_PROJ][1], 64)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert torch.isfinite(logits(AutoModelForCausalLM.from_config(config))).all()
    base = AutoModel.from_pretrained(saved)
    assert isinstance(base.get_submodule(Q_PROJ.removeprefix("model.")), LowRankLinear)
    with torch.no_grad():
        assert torch.equal(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state)


def test_a_pipeline_generates(saved: Path, tiny_tokenizer: Any) -> None:
    tiny_tokenizer.save_pretrained(saved)
    generate = pipeline("text-generation", model=str(saved), device="cpu")
    (answer,) = generate("rank", max_new_tokens=4, do_sample=False, return_full_text=True)
    assert answer["generated_text"].startswith("rank")


@pytest.mark.parametrize("method", ["push_to_hub", "save_pretrained"])
def test_a_push_uploads_plan_card_and_code(method: str, model: Any, tmp_path: Path, monkeypatch: Any) -> None:
    pushed: dict[str, str] = {}
    hub_of_one = fake_hub(pushed)
    monkeypatch.setattr(hub, "hf_api", lambda: hub_of_one)
    monkeypatch.setattr("transformers.modeling_utils.hf_api", lambda: hub_of_one)
    monkeypatch.setattr(hub.ModelCard, "load", Mock(side_effect=EntryNotFoundError("no card")))
    if method == "push_to_hub":
        model.push_to_hub("me/small")
    else:
        model.save_pretrained(tmp_path / "pushed", push_to_hub=True, repo_id="me/small")
    assert set(pushed) == {"config.json", "generation_config.json", "model.safetensors", DIGESTS, *COMPANIONS}
    assert "compressed to" in pushed["README.md"]


def fake_hub(pushed: dict[str, str]) -> Any:
    """A hub that keeps the text of what is committed."""

    def create_commit(operations: Any, **_: Any) -> str:
        files = {each.path_in_repo: Path(each.path_or_fileobj).read_bytes() for each in operations}
        pushed.update({name: content.decode(errors="replace") for name, content in files.items()})
        return "commit"

    return SimpleNamespace(
        create_repo=lambda repo_id, **_: SimpleNamespace(repo_id=repo_id),
        create_branch=lambda **_: None,
        create_commit=create_commit,
    )


def test_another_plan_and_none_are_refused(saved: Path) -> None:
    digest = AutoConfig.from_pretrained(saved).gac["plan"]
    (saved / "plan.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"plan.json has digest 44136fa355b3; expected {digest[:12]}, as config"):
        AutoModelForCausalLM.from_pretrained(saved)
    (saved / "plan.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no plan\.json; expected every file that gac\.save wrote"):
        AutoModelForCausalLM.from_pretrained(saved)
