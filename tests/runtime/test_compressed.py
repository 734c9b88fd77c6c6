"""Refusals of the compressed classes: a damaged config, missing weights."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.compression.compressed import MakePlan, small_compressed

Q_PROJ = "model.layers.0.self_attn.q_proj"
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def model(make_plan: MakePlan) -> Any:
    return small_compressed("llama", make_plan)


def sizes(**changed: Any) -> Change:
    return lambda header: header["modules"][Q_PROJ]["sizes"].update(changed)


def added(name: str) -> Change:
    return lambda header: header["modules"].update({name: {}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((sizes(rank=rank), rf"{Q_PROJ}.sizes.rank is {rank}; expected an integer") for rank in (0, 10**12)),
        (sizes(rank="16"), r"expected `int`, got `str` - at `\$.modules"),
        (lambda header: header["modules"][Q_PROJ]["sizes"].pop("rank"), r"sizes is .* expected an object with"),
        (lambda header: header["modules"][Q_PROJ].update(module="os.system"), "module is 'os.system'; expected one of"),
        *((added(name), f"modules names '{name}'; expected a linear") for name in ("model.layers.9.mlp", "lm_heads")),
        (lambda header: header.update(schema_version=1), "schema_version is 1; expected 3"),
        (lambda header: header.update(fused=[["model.layers.0.input_layernorm"]]), "fused has .* in one storage"),
        (lambda header: header.update(rounded=[{"by": "model.norm", "readers": ["model.norm"]}]), "names of a norm"),
        (lambda header: header.update(rounded=7), r"expected `array`, got `int` - at `\$.rounded`"),
        (lambda header: header.update(rounded=[{"by": "a"}]), "missing required field `readers`"),
        (lambda header: header.update(fused=7), r"expected `array`, got `int` - at `\$.fused`"),
        (lambda header: header.update(code="x"), "object contains unknown field `code`"),
        (lambda header: header["modules"][Q_PROJ].update(code="x"), "object contains unknown field `code`"),
    ],
)
def test_a_damaged_config_is_refused(model: Any, change: Change, message: str) -> None:
    config = copy.deepcopy(model.config)
    change(config.gac)
    with pytest.raises(ValueError, match=f"config.json, key gac: .*{message}"):
        type(model)(config)


def test_weights_that_are_missing_are_not_made_up(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{Q_PROJ}.first.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{Q_PROJ}.first.weight is missing \(1 in all\); expected every weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
