"""Settings of PyTorch that a caller has on: results are those without them, and they are as they were afterwards."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gac
from gac.healing.text import epoch_indices
from gac.measurement.documents import Documents
from gac.measurement.similarity import check_windows
from gac.measurement.text import TextSpec, windows_of
from gac.measurement.texts import Texts
from gac.testing import models
from tests.compression.applying import logits
from tests.small_pipeline import Small


@contextmanager
def _set(change: Callable[[Any], None], value: Any, usual: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(usual)


@contextmanager
def _several(*settings: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for setting in settings:
            stack.enter_context(setting)
        yield


_dtype = partial(_set, torch.set_default_dtype, usual=torch.float32)
SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float64": lambda: _dtype(torch.float64),
    "float16": lambda: _dtype(torch.float16),
    "device": lambda: _set(torch.set_default_device, "meta", None),
    "inference": torch.inference_mode,
    "deterministic, precision and anomalies": lambda: _several(
        _set(torch.use_deterministic_algorithms, True, False),
        _set(torch.set_float32_matmul_precision, "medium", "highest"),
        torch.autograd.set_detect_anomaly(True),
    ),
}


UNLIMITED: dict[str, Any] = {"latency": "any", "slack": 0}


@pytest.fixture(scope="module")
def usual(tiny_tokenizer: Any, prose: str, tmp_path_factory: Any) -> tuple[Small, gac.Plan, Any]:
    """The pipeline, a plan and the compressed model, without settings."""
    text = tmp_path_factory.mktemp("text") / "prose.txt"
    text.write_text(prose, encoding="utf-8")
    small = Small(models.tiny_model(), tiny_tokenizer, text)
    plan = small.allocate(0.7, check_text=_check(prose), **UNLIMITED)
    return small, plan, small.compress(plan, model=copy.deepcopy(small.model))


def _check(prose: str) -> gac.Documents:
    return gac.Documents([prose[::-1]])


@pytest.mark.parametrize(
    "setting",
    [pytest.param(SETTINGS[name], id=name, marks=pytest.mark.slow if name == "float16" else ()) for name in SETTINGS],
)
def test_settings_change_nothing(usual: Any, setting: Any, prose: str, tmp_path: Path, monkeypatch: Any) -> None:
    small, plan, compressed = usual
    model = copy.deepcopy(small.model)
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "own"))
    with setting():
        before = _state()
        with suppress(gac.GacError):
            gac.perplexity(small.model, small.tokenizer, prose, windows=10**6)
        assert small.allocate(0.7, check_text=_check(prose), **UNLIMITED) == plan
        ours = small.compress(plan, model=model)
        measured = gac.perplexity(ours, small.tokenizer, prose, windows=2, length=32)
        assert _state() == before
    assert small.allocate(0.7, check_text=_check(prose), **UNLIMITED) == plan  # from what was kept
    assert torch.equal(logits(ours), logits(compressed))
    assert measured == gac.perplexity(ours, small.tokenizer, prose, windows=2, length=32)
    for parameter in ours.parameters():
        assert not parameter.is_inference()


def test_models_are_loaded_for_training_in_inference_mode(small: Small, prose: str, tmp_path: Path) -> None:
    gac.save(small.compress(small.allocate(0.7)), tmp_path / "small", tokenizer=small.tokenizer)
    with torch.inference_mode():
        model: Any = gac.load(tmp_path / "small", device="cpu")
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    gac.perplexity(model, small.tokenizer, prose, windows=1, length=8)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.is_inference() for name, parameter in model.named_parameters() if "lm_head" not in name)


def _state() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
    )


def test_the_precision_of_one_backend_is_as_it_was(small: Small, prose: str) -> None:
    def look(*_: Any) -> None:
        seen.append(torch.get_float32_matmul_precision())

    seen: list[str] = []
    backend, handle = torch.backends.cuda.matmul, small.model.register_forward_hook(look)
    with _set(partial(setattr, backend, "fp32_precision"), "tf32", "ieee"):
        gac.perplexity(small.model, small.tokenizer, prose, windows=1, length=8)
        assert backend.fp32_precision == "tf32"
    handle.remove()
    assert seen == ["highest"]


def test_the_order_and_the_check_of_texts_do_not_depend_on_the_default_dtype(small: Small, prose: str) -> None:
    of_text = torch.arange(40).repeat_interleave(torch.arange(1, 41))
    order = epoch_indices(of_text)
    with _dtype(torch.float16):
        assert torch.equal(epoch_indices(of_text), order)
    texts = Texts((TextSpec(str(small.text), 4, 64),))
    calibration = windows_of("calibration", torch.arange(12), small.tokenizer, 4, 4)
    check = Documents([prose[::-1]], length=4)
    found = check_windows(small.model, small.tokenizer, texts, calibration, check)
    with _dtype(torch.bfloat16):
        again = check_windows(small.model, small.tokenizer, texts, calibration, check)
    assert torch.equal(again.ids, found.ids)
