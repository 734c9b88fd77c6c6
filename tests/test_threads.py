"""Threads: models load one after the other, and a model is worked on by one call at a time."""

import copy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from torch import nn

import gac
from gac.core.errors import ModelError
from gac.models.loading import load_model
from tests.small_pipeline import Small

DTYPES = (torch.float32, torch.bfloat16) * 2


@pytest.fixture
def _impatient() -> Iterator[None]:
    """Threads take turns so often that they meet in whatever they share."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each returns, or the error that it raises, where all begin at the same time."""
    start = Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        start.wait()
        try:
            return call()
        except gac.GacError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


@pytest.fixture
def checkpoint(small: Small, tmp_path: Path) -> Path:
    gac.save(small.compress(small.allocate(0.7)), tmp_path / "small", tokenizer=small.tokenizer)
    return tmp_path / "small"


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("compressed", [True, False])
def test_models_loaded_at_once_are_what_was_asked_for(compressed: bool, directory: Path, checkpoint: Path) -> None:
    initialise = nn.Linear.reset_parameters

    def load(dtype: torch.dtype) -> Any:
        return gac.load(checkpoint, dtype=dtype) if compressed else load_model(directory, dtype=dtype).model

    models = at_once([partial(load, dtype) for dtype in DTYPES])
    assert [{one.dtype for one in model.parameters()} for model in models] == [{dtype} for dtype in DTYPES]
    if compressed:
        at_once([lambda: type(models[0])(models[0].config)] * 4)
    assert nn.Linear.reset_parameters is initialise
    assert torch.get_default_dtype() is torch.float32


CALLS: dict[str, Callable[[Small, gac.Plan, Path], Any]] = {
    "allocate": lambda small, plan, path: small.allocate(0.7),
    "frontier": lambda small, plan, path: small.frontier(points=2),
    "compress": lambda small, plan, path: small.compress(plan),
    "perplexity": lambda small, plan, path: gac.perplexity(small.model, small.tokenizer, windows=1, length=8),
    "divergence": lambda small, plan, path: gac.divergence(small.model, small.model, small.tokenizer, windows=1),
    "evaluate": lambda small, plan, path: gac.evaluate([small.model], tokenizer=small.tokenizer, windows=1),
    "save": lambda small, plan, path: gac.save(small.model, path / "a"),
    "export": lambda small, plan, path: gac.export(small.model, path / "a", merge=True),
    "export_gguf": lambda small, plan, path: gac.export_gguf(small.model, path / "a", merge=True),
}


def test_a_model_in_use_is_refused(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, begun, go_on = small.allocate(0.9), Event(), Event()

    def measure(*_args: Any, **_options: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        raise gac.GacError("the end", "of", "it.")

    monkeypatch.setattr("gac.api.measuring", measure)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(small.allocate, 0.8)
        assert begun.wait(60)
        try:
            for name, call in CALLS.items():
                with pytest.raises(ModelError, match=f"gac.{name} of a LlamaForCausalLM that another thread is using"):
                    call(small, plan, tmp_path)
        finally:
            go_on.set()
        assert str(first.exception()).startswith("the end")
    assert not list(tmp_path.glob("a*"))


def test_a_model_is_free_again_after_a_call_that_failed_and_others_are_measured_side_by_side(small: Small) -> None:
    with pytest.raises(gac.GacError):
        small.allocate(0.01)
    other = copy.deepcopy(small.model)
    first, second = at_once([lambda: small.allocate(0.7), lambda: small.allocate(0.7, model=other)])
    assert first == second == small.allocate(0.7)
