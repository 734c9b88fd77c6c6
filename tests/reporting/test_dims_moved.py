"""What each choice moves, from a config alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import LlamaConfig

from gac.cli import main
from gac.errors import PlanError
from gac.models.families import family_of
from gac.models.shapes import SHAPES
from gac.models.sites import Site
from gac.models.weights import Weight
from gac.reporting.dims_moved import Choice, Moved, choices
from tests.models.small import small_config

LLAMA = SHAPES["llama-3-8b"]


def of_llama(*forms: str) -> dict[tuple[str, str], Choice]:
    found = choices(family_of(LLAMA).sites(LLAMA), forms)
    return {(one.kind, one.form): one for one in found}


def test_a_rank_is_n_of_one_gemm_and_k_of_the_next() -> None:
    found = of_llama("low_rank")
    assert [kind for kind, _ in found] == [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    assert found["k_proj", "low_rank"] == Choice(
        "k_proj",
        32,
        "low_rank",
        819,
        1,
        (
            Moved("k_proj.first", "linear", "n", 1, {"k": 4096}),
            Moved("k_proj.second", "linear", "k", 1, {"n": 1024}),
        ),
    )


def test_a_width_is_n_of_two_gemms_and_k_of_the_third() -> None:
    (found,) = of_llama("narrow").values()
    assert (found.kind, found.largest) == ("mlp", 14335)
    assert [(one.weight, one.axis, one.per_dim) for one in found.moved] == [
        ("gate_proj", "n", 1),
        ("up_proj", "n", 1),
        ("down_proj", "k", 1),
    ]


def test_a_head_dim_moves_two_gemms_attention_and_the_cache() -> None:
    (found,) = of_llama("head_dim").values()
    assert (found.kind, found.largest, found.step) == ("v_proj+o_proj", 127, 8)
    assert found.moved == (
        Moved("v_proj", "linear", "n", 8, {"k": 4096}),
        Moved("attention", "sdpa", "values", 1, {"kv": 8}),
        Moved("cache", None, None, 8, {}),
        Moved("o_proj", "linear", "k", 32, {"n": 4096}),
    )


def test_the_rank_of_groups_moves_two_gemms_and_the_cache() -> None:
    found = of_llama("grouped")
    assert [kind for kind, _ in found] == ["k_proj", "v_proj"]
    assert found["k_proj", "grouped"].moved == (
        Moved("k_proj.first", "linear", "n", 2, {"k": 4096}),
        Moved("k_proj.second", "batched_gemm", "k", 1, {"b": 2, "n": 512}),
        Moved("cache", None, None, 2, {}),
    )


def test_layers_of_other_shapes_are_told_apart() -> None:
    sites = [Site(f"{at}.up", at, "up", (Weight(f"{at}.up", 64 if at else 96, 32),)) for at in range(3)]
    assert [(one.layers, one.largest) for one in choices(sites, ["low_rank"])] == [(1, 23), (2, 21)]


def test_dense_has_nothing_to_choose_and_an_unknown_form_is_refused() -> None:
    assert of_llama("dense") == {}
    with pytest.raises(PlanError, match="form 'wide' is unknown"):
        of_llama("wide")


def test_the_command_draws_a_known_model() -> None:
    result = CliRunner().invoke(main, ["graph", "llama-3-8b"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    lines = " ".join(result.stdout.split())
    assert "v_proj+o_proj 32 head_dim d 1 to 127 v_proj: N = 8 d (K = 4,096)" in lines
    assert "KV cache: 8 d values a token o_proj: K = 32 d (N = 4,096)" in lines


def test_the_command_reads_a_config(tmp_path: Path, tiny_config: LlamaConfig) -> None:
    tiny_config.save_pretrained(tmp_path)
    result = CliRunner().invoke(main, ["graph", str(tmp_path), "--form", "narrow", "--json"])
    document = json.loads(result.stdout)
    assert [(one["kind"], one["layers"], one["largest"]) for one in document["choices"]] == [("mlp", 2, 175)]
    assert document["choices"][0]["moved"][2] == {
        "weight": "down_proj",
        "operator": "linear",
        "axis": "k",
        "per_dim": 1,
        "fixed": {"n": 64},
    }


def pair(name: str, largest: int) -> tuple[str, str, int, list[str]]:
    return name, "low_rank", largest, [f"{name}.first n 1", f"{name}.second k 1"]


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        (
            "phi3",  # gate and up are one weight, and move together
            [
                *(pair("qkv_proj", 42), pair("o_proj", 31), pair("gate_up_proj", 54), pair("down_proj", 46)),
                ("mlp", "narrow", 175, ["gate_up_proj n 2", "down_proj k 1"]),
            ],
        ),
        (
            "gpt2",  # two weights are called c_proj; the MLP has no gate
            [
                *(pair("c_attn", 47), pair("attn.c_proj", 31), pair("c_fc", 46), pair("mlp.c_proj", 46)),
                ("mlp", "narrow", 175, ["c_fc n 1", "mlp.c_proj k 1"]),
            ],
        ),
    ],
)
def test_every_choice_and_what_it_moves(tmp_path: Path, model_type: str, expected: list[Any]) -> None:
    small_config(model_type).save_pretrained(tmp_path)
    document = json.loads(CliRunner().invoke(main, ["graph", str(tmp_path), "--json"]).stdout)
    for one, (kind, form, largest, moved) in zip(document["choices"], expected, strict=True):
        assert (one["kind"], one["form"], one["largest"]) == (kind, form, largest)
        assert [f"{axis['weight']} {axis['axis']} {axis['per_dim']}" for axis in one["moved"]] == moved


def test_a_form_that_fits_nothing_is_refused_where_it_is_named(tmp_path: Path) -> None:
    small_config("phi3").save_pretrained(tmp_path)
    result = CliRunner().invoke(main, ["graph", str(tmp_path), "--form", "head_dim"])
    assert result.exit_code == 1
    assert "form head_dim, which fits no weight of a phi3 model" in result.stderr


def test_a_misspelt_name_is_recognised() -> None:
    result = CliRunner().invoke(main, ["graph", "llama-3-8B"])
    assert result.exit_code == 1
    assert "Did you mean 'llama-3-8b'?" in result.stderr
