"""What the code that every checkpoint carries refuses: a config that was damaged, weights that are not there."""

import contextlib
import copy
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from gac.plan.plan import Plan
from gac.runtime.model import uncollected
from tests.compression.compressed import small_compressed

Q_PROJ = "model.layers.0.self_attn.q_proj"
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def model(make_plan: Callable[..., Plan]) -> Any:
    return small_compressed("llama", make_plan)


def sizes(**changed: Any) -> Change:
    return lambda header: header["modules"][Q_PROJ]["sizes"].update(changed)


def added(name: str) -> Change:
    return lambda header: header["modules"].update({name: {}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            (sizes(rank=rank), f"{Q_PROJ}.sizes.rank is {rank!r}; expected an integer from 1 to 128.")
            for rank in (-3, 0, 10**12, "16", 16.0, True)
        ),
        (
            lambda header: header["modules"][Q_PROJ]["sizes"].pop("rank"),
            f"{Q_PROJ}.sizes is {{'in_features': 64, 'out_features': 128}}; "
            "expected an object with in_features, rank, out_features.",
        ),
        (
            lambda header: header["modules"][Q_PROJ].update(module="os.system"),
            f"{Q_PROJ}.module is 'os.system'; expected one of Linear, LowRankLinear, LatentLinear, "
            "RoundedLatentLinear, ValueLinear, Absent, Constant.",
        ),
        *(
            (added(name), f"modules names {name!r}; expected a linear weight of this model.")
            for name in ("model.layers.9.mlp", "model.embed_tokens")
        ),
        (
            lambda header: header.update(modules=[]),
            "modules is []; expected an object with a member for every weight that changed.",
        ),
        (
            lambda header: header.update(schema_version=1),
            "schema_version is 1; expected 3. Open it with the version of GAC that wrote it.",
        ),
        (
            lambda header: header.update(fused=[["model.layers.0.input_layernorm"]]),
            "fused has ['model.layers.0.input_layernorm']; expected lists of names of linear weights in one storage.",
        ),
        (
            lambda header: header.update(fused=7),
            "fused has 7; expected lists of names of linear weights in one storage.",
        ),
    ],
)
def test_a_damaged_config_is_refused(model: Any, change: Change, message: str) -> None:
    config = copy.deepcopy(model.config)
    change(config.gac)
    with pytest.raises(ValueError) as caught:
        type(model)(config)
    said = str(caught.value).replace(", PickedLinear.", ".")  # which the tests of extending add
    assert said == f"config.json, key gac: {message}"


def test_weights_that_are_missing_are_not_made_up(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{Q_PROJ}.first.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError) as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert str(caught.value) == (
        f"{tmp_path / 'saved'}: {Q_PROJ}.first.weight is missing (1 in all); "
        "expected every weight that config.json describes."
    )


def test_copies_of_a_config_that_was_read_share_its_modules(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "saved")
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config
    again = copy.deepcopy(config)
    assert again.gac is config.gac
    assert again.to_dict() == config.to_dict()
    assert (
        json.loads(again.to_json_string())["gac"] == json.loads((tmp_path / "saved" / "config.json").read_text())["gac"]
    )


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("failure", [None, OSError])
def test_loading_leaves_the_garbage_collector_as_it_was(collects: bool, failure: type[OSError] | None) -> None:
    (gc.enable if collects else gc.disable)()
    try:
        with contextlib.suppress(OSError), uncollected():
            assert not gc.isenabled()
            if failure:
                raise failure
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_what_was_made_without_the_collector_is_not_walked_when_it_is_on_again() -> None:
    walked: list[Any] = []
    gc.collect()  # nothing before asks for it
    gc.callbacks.append(lambda phase, info: walked.append(info["generation"]) if phase == "start" else None)
    try:
        with uncollected():
            made = [[] for _ in range(20_000)]
        made += [[] for _ in range(10)]
    finally:
        gc.callbacks.pop()
    assert not walked
    assert gc.get_count()[0] < 1000
    assert gc.get_freeze_count() == 0
    first = made[0]
    assert any(found is first for found in gc.get_objects(generation=2))


def test_what_somebody_has_frozen_stays_so() -> None:
    frozen: list[Any] = []
    gc.freeze()
    try:
        with uncollected():
            pass
        assert gc.get_freeze_count() > 0
        assert all(found is not frozen for found in gc.get_objects())
    finally:
        gc.unfreeze()


def test_construction_leaves_the_initialisation_of_linear_weights_as_it_was(model: Any) -> None:
    before = nn.Linear.reset_parameters
    with torch.device("meta"):
        type(model)(model.config)
    assert nn.Linear.reset_parameters is before
    fresh = type(model)(model.config)
    assert all(parameter.std() > 0.005 for parameter in fresh.parameters() if parameter.ndim == 2)
    assert all(torch.isfinite(parameter).all() for parameter in fresh.parameters())
