"""What a change loses, by running the model: how many windows that takes, and what few of them are worth."""

from statistics import fmean

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from gac.core.errors import ModelError
from gac.measurement import runs
from gac.measurement.runs import ModelRuns, drawn_loss, window_loss
from tests.models.small import small_config, small_model

NAME = "model.layers.1.mlp.down_proj"
WINDOWS = torch.arange(12 * 32).reshape(12, 32) % 97


@pytest.fixture
def model() -> PreTrainedModel:
    return small_model(small_config("llama"))


@pytest.fixture(autouse=True)
def _two_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "TOKENS", 64)


def changed(model: PreTrainedModel, factor: float) -> dict[str, nn.Module]:
    """The MLP writes so many times what it did."""
    linear = model.get_submodule(NAME)
    assert isinstance(linear, nn.Linear)
    other = nn.Linear(linear.in_features, linear.out_features, bias=False)
    with torch.no_grad():
        other.weight.copy_(factor * linear.weight)
    return {NAME: other}


def runs_of(model: PreTrainedModel, windows: Tensor) -> ModelRuns:
    return ModelRuns(model, list(model.model.layers), windows, [])


def windows_run(model: PreTrainedModel, seen: ModelRuns, factor: float) -> int:
    """How many windows were run from the embedding on."""
    calls: list[None] = []
    with model.get_input_embeddings().register_forward_hook(lambda *_: calls.append(None)):
        seen.lost(changed(model, factor))
    return len(calls)


def test_windows_run_until_the_error_is_small(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = runs_of(model, WINDOWS)
    monkeypatch.setattr(runs, "SURE", 1e3)
    few = windows_run(model, seen, 30.0)
    monkeypatch.setattr(runs, "SURE", 0.0)
    monkeypatch.setattr(runs, "SURE_SHARE", 0.0)
    assert windows_run(model, seen, 30.0) == few + 2 * 10  # of each other window the dense model and the changed one
    assert windows_run(model, seen, 20.0) == few + 10  # the dense one is known


def test_many_windows_say_what_the_text_loses(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SURE", 0.0)
    monkeypatch.setattr(runs, "SURE_SHARE", 0.0)
    monkeypatch.setattr(runs, "DIFFERS", 1e6)  # the divergence says nothing
    seen, modules = runs_of(model, WINDOWS), changed(model, 30.0)
    before = fmean(float(window_loss(model, ids).detach()) / 31 for ids in WINDOWS)
    found = seen.lost(modules)
    model.set_submodule(NAME, modules[NAME])
    after = fmean(float(window_loss(model, ids).detach()) / 31 for ids in WINDOWS)
    assert found == pytest.approx(max(0.0, after - before), rel=1e-3, abs=1e-6)


def test_one_window_says_no_more_than_the_divergence_and_no_number_is_refused(model: PreTrainedModel) -> None:
    seen, modules = runs_of(model, WINDOWS[:1]), changed(model, 30.0)
    assert seen.lost(modules) == seen.divergence(modules) > 0
    with pytest.raises(ModelError, match=NAME):
        runs_of(model, WINDOWS).lost(changed(model, float("nan")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_drawn_loss_is_that_of_its_labels(model: PreTrainedModel, dtype: torch.dtype) -> None:
    ids, kept = WINDOWS[0], list[Tensor]()
    embedding = model.to(dtype).get_input_embeddings()

    def states(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        kept.append(output.detach().requires_grad_(True))
        return kept[-1]

    with embedding.register_forward_hook(states):
        observed, drawn = drawn_loss(model, ids, "a window", seed=3)
        (3 * drawn).backward()
        logits = model(input_ids=ids[None]).logits[0, :-1].float()
    assert float(observed) == pytest.approx(float(cross_entropy(logits, ids[1:], reduction="sum").detach()), rel=1e-3)
    chances = logits.detach().softmax(-1)
    upto = chances.cumsum(-1)
    dice = torch.Generator().manual_seed(3)
    labels = torch.searchsorted(upto, torch.rand(len(upto), 1, generator=dice) * upto[:, -1:], right=True)[:, 0]
    loss = cross_entropy(logits, labels, reduction="sum")
    loss.backward()
    assert float(drawn.detach()) == pytest.approx(float(loss.detach()), rel=1e-3)
    given, expected = (states.grad for states in kept)
    assert given is not None
    assert expected is not None
    assert (given - 3 * expected).norm() <= (1e-5 if dtype == torch.float32 else 0.05) * given.norm()
