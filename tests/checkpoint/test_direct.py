"""``gac.load`` fills a model itself, or lets transformers do it: the models are the same."""

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import gac
from gac.checkpoint.direct import empty_model
from gac.checkpoint.files import described, read_config
from gac.core.errors import CheckpointError
from gac.models import moving
from gac.plan.plan import Plan
from gac.runtime.contract import DIGESTS
from tests.compression.applying import IDS, logits
from tests.compression.compressed import changes_of, compressed
from tests.compression.ends import with_rounded_ends
from tests.compression.stored import stored_model
from tests.models.small import every_family, small_config, small_model

MakePlan = Callable[..., Plan]
# The package has a function of this name.
loading = importlib.import_module("gac.checkpoint.load")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where transformers' loader is asked after all."""
    monkeypatch.setattr(loading, "_by_transformers", None)


def by_transformers(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def tensors_of(model: Any) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers()) | model.state_dict(keep_vars=True)


def check_same(one: Any, other: Any) -> None:
    """Classes, tensors of all kinds, what is tied, flags, configs and hooks."""
    assert type(one) is type(other)
    assert not one.training
    assert [(name, type(module)) for name, module in one.named_modules()] == [
        (name, type(module)) for name, module in other.named_modules()
    ]
    for (name, module), alike in zip(one.named_modules(), other.modules(), strict=True):
        assert module.training == alike.training, name
        assert module._non_persistent_buffers_set == alike._non_persistent_buffers_set
        assert len(module._forward_pre_hooks) == len(alike._forward_pre_hooks)
        assert type(vars(module).get("forward")) is type(vars(alike).get("forward"))
    held, due = tensors_of(one), tensors_of(other)
    assert held.keys() == due.keys()
    for name, values in held.items():
        assert torch.equal(bits(values), bits(due[name])), name
        assert (values.dtype, values.requires_grad, type(values), values.device) == (
            due[name].dtype,
            due[name].requires_grad,
            type(due[name]),
            due[name].device,
        )
    assert tied(held) == tied(due)
    assert one.config.to_dict() == other.config.to_dict()
    assert one.generation_config.to_dict() == other.generation_config.to_dict()
    assert {**vars(one.config)} == {**vars(other.config)}
    assert one.gac_files == other.gac_files
    assert one.gac_plan == other.gac_plan


def bits(values: Tensor) -> Tensor:
    return values.detach().reshape(-1).view(torch.uint8)


def tied(held: dict[str, Tensor]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, values in held.items():
        groups.setdefault(id(values), []).append(name)
    return sorted(names for names in groups.values() if len(names) > 1)


@every_family
def test_every_form_and_scheme(model_type: str, make_plan: MakePlan, tmp_path: Path, alone: None) -> None:
    stored_model(model_type, make_plan, fused=True).save_pretrained(tmp_path)
    check_same(gac.load(tmp_path, device="cpu"), by_transformers(tmp_path))


@every_family
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_dims_alone(model_type: str, tied: bool, make_plan: MakePlan, tmp_path: Path, alone: None) -> None:
    model = small_model(small_config(model_type, tie_word_embeddings=tied))
    model.generation_config.max_new_tokens = 5
    model = compressed(model, make_plan, changes_of(model.config), fused=True)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = gac.load(tmp_path, device="cpu")
    check_same(loaded, by_transformers(tmp_path))
    assert loaded.generation_config.max_new_tokens == 5


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_stored_ends(tied: bool, make_plan: MakePlan, tmp_path: Path, alone: None) -> None:
    config = small_config("gemma", tie_word_embeddings=tied)
    config.dtype = torch.bfloat16
    with_rounded_ends(small_model(config), make_plan).save_pretrained(tmp_path)
    check_same(gac.load(tmp_path, device="cpu"), by_transformers(tmp_path))


@pytest.fixture
def saved(make_plan: MakePlan, tmp_path: Path) -> Path:
    stored_model("llama", make_plan).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_another_dtype(dtype: torch.dtype, saved: Path, alone: None) -> None:
    check_same(gac.load(saved, "cpu", dtype), by_transformers(saved, dtype=dtype))


def test_without_a_generation_config(saved: Path, alone: None) -> None:
    (saved / "generation_config.json").unlink()
    (saved / DIGESTS).unlink()
    check_same(gac.load(saved, "cpu"), by_transformers(saved))


def test_what_is_written_to_the_model_is_not_written_to_its_file(saved: Path) -> None:
    before = (saved / "model.safetensors").read_bytes()
    with torch.no_grad():
        for one in gac.load(saved, "cpu").state_dict().values():
            one.zero_()
    assert (saved / "model.safetensors").read_bytes() == before


def test_transformers_makes_up_none_of_its_values_later(saved: Path) -> None:
    """As it does for adapters: it initialises whatever it does not know to be initialised."""
    model = gac.load(saved, "cpu")
    before = logits(model)
    model.initialize_weights()
    assert torch.equal(logits(model), before)


def test_it_can_be_trained(saved: Path) -> None:
    model = gac.load(saved, "cpu", torch.float32).train()
    model(IDS, labels=IDS).loss.backward()
    assert model.model.norm.weight.grad is not None


# --- what transformers has to load -----------------------------------------------------------------------------------

NORM = "model.norm.weight"
OTHERS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "missing": lambda held: {name: one for name, one in held.items() if name != NORM},
    "unexpected": lambda held: held | {"other": torch.zeros(2)},
    "of another shape": lambda held: held | {NORM: held[NORM][:-1].clone()},
    "of whole numbers": lambda held: held | {NORM: held[NORM].to(torch.int32)},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
def test_other_tensors_are_left_to_it(change: Any, saved: Path) -> None:
    """And refused as it has always been done."""
    held = change(load_file(saved / "model.safetensors"))
    save_file(held, saved / "model.safetensors", metadata={"format": "pt"})
    (saved / DIGESTS).unlink()
    config = by_config(saved)
    assert empty_model(loading._class_of(config), config, "auto", held) is None
    with pytest.raises(CheckpointError):
        gac.load(saved, "cpu")


def by_config(saved: Path) -> Any:
    return described(read_config(saved), saved)


@pytest.mark.parametrize("name", ["quantization_config", "fusion_config"])
def test_configs_that_change_modules_are_left_to_it(name: str, saved: Path) -> None:
    config = by_config(saved)
    held = load_file(saved / "model.safetensors")
    assert empty_model(loading._class_of(config), config, "auto", held) is not None
    setattr(config, name, {"some": "thing"})
    assert empty_model(loading._class_of(config), config, "auto", held) is None


def test_weights_that_stay_in_float32_are_left_to_it(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, held = by_config(saved), load_file(saved / "model.safetensors")
    monkeypatch.setattr(loading._class_of(config), "_keep_in_fp32_modules", ["norm"])
    assert empty_model(loading._class_of(config), config, "auto", held) is None


# --- the thread that sends -------------------------------------------------------------------------------------------


@contextmanager
def as_if_to_a_gpu(sent: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Load to a device that is taken for a GPU, with another sender; afterwards its thread has ended."""
    threads = threading.active_count()
    plain = moving.sending
    with monkeypatch.context() as patched:
        patched.setattr(moving, "_sent", sent)
        patched.setattr(loading, "sending", lambda tensors, _: plain(tensors, torch.device("cuda:0")))
        yield
    assert threading.active_count() == threads


def test_the_model_has_what_arrived(saved: Path, monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    due = gac.load(saved, device="cpu")
    found: set[int] = set()

    def sent(tensors: Any, device: torch.device, stopped: threading.Event) -> list[Tensor]:
        assert (device.type, stopped.is_set()) == ("cuda", False)
        assert threading.current_thread() is not threading.main_thread()
        there = [one.clone() for one in tensors]
        found.update(one.data_ptr() for one in there)
        return there

    with as_if_to_a_gpu(sent, monkeypatch):
        model = gac.load(saved, device="cpu")
    check_same(model, due)
    assert model.model.norm.weight.data_ptr() in found


def test_what_fails_in_the_thread_is_raised(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(*_: Any) -> list[Tensor]:
        raise torch.OutOfMemoryError("no room")

    with as_if_to_a_gpu(sent, monkeypatch), pytest.raises(torch.OutOfMemoryError, match="no room"):
        gac.load(saved, device="cpu")


def test_no_room_is_not_said_to_be_a_damaged_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def share(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("gac.runtime.compressed._share_where_possible", share)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        gac.load(saved, device="cpu")


def test_what_fails_beside_it_stops_the_thread(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def sent(tensors: Any, device: torch.device, stopped: threading.Event) -> list[Tensor]:
        ended.append(stopped.wait(60))
        return list(tensors)

    def failing(*_: Any) -> None:
        raise ValueError("no such module; expected another.")

    monkeypatch.setattr(loading, "empty_model", failing)
    with as_if_to_a_gpu(sent, monkeypatch), pytest.raises(CheckpointError, match="no such module"):
        gac.load(saved, device="cpu")
    assert ended == [True]
