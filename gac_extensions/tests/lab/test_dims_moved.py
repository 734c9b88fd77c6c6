"""What each choice moves, from a config alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from gac.core.errors import PlanError
from gac.models.families import family_of
from gac.models.shapes import SHAPES
from gac.models.sites import Site, Weight
from gac_extensions.lab.dims_moved import Choice, Moved, choices, tokens_kept
from tests.cli.commands import refused, run
from tests.models.small import small_config

LLAMA = SHAPES["llama-3-8b"]
LINEAR = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
PAIR = Moved("k_proj.first", "linear", "n", 1, {"k": 4096}), Moved("k_proj.second", "linear", "k", 1, {"n": 1024})
MLP = (
    *(Moved(name, "linear", "n", 1, {"k": 4096}) for name in ("gate_proj", "up_proj")),
    Moved("down_proj", "linear", "k", 1, {"n": 4096}),
)
HEADS = (
    Moved("v_proj", "linear", "n", 8, {"k": 4096}),
    Moved("attention", "sdpa", "values", 1, {"kv": 8}),
    Moved("cache", None, None, 8, {}),
    Moved("o_proj", "linear", "k", 32, {"n": 4096}),
)
GROUPS = (
    Moved("k_proj.first", "linear", "n", 2, {"k": 4096}),
    Moved("k_proj.second", "batched_gemm", "k", 1, {"b": 2, "n": 512}),
    Moved("attention", "latent_attention_int4", "k", 1, {}),
    Moved("cache", None, None, 1, {}, 2),
)


def of_llama(form: str) -> dict[str, Choice]:
    return {choice.kind: choice for choice in choices(family_of(LLAMA).sites(LLAMA), [form])}


@pytest.mark.parametrize(
    ("form", "kinds", "expected"),
    [
        ("low_rank", LINEAR, Choice("k_proj", 32, "low_rank", 819, 1, PAIR)),
        ("latent:int4", "k_proj v_proj", Choice("k_proj", 32, "latent:int4", 512, 8, GROUPS)),
        ("narrow", "mlp", Choice("mlp", 32, "narrow", 14335, 1, MLP)),
        ("head_dim", "v_proj+o_proj", Choice("v_proj+o_proj", 32, "head_dim", 127, 8, HEADS)),
    ],
)
def test_a_form_moves_gemms_attention_and_the_cache(form: str, kinds: str, expected: Choice) -> None:
    choices_of_form = of_llama(form)
    assert list(choices_of_form) == kinds.split()
    assert choices_of_form[expected.kind] == expected


def test_a_pair_inside_a_narrower_mlp_moves_the_gemms_of_its_width() -> None:
    forms = choices(family_of(LLAMA).sites(LLAMA), ["narrow", "narrow_pair"])
    pairs = [choice for choice in forms if choice.form != "narrow"]
    assert [pair.form for pair in pairs[::3]] == [f"narrow_pair:{width}" for width in (10752, 8960, 7168, 5376, 3584)]
    assert [pair.kind for pair in pairs[:3]] == ["gate_proj", "up_proj", "down_proj"]
    assert pairs[-1].moved == (
        Moved("down_proj.first", "linear", "n", 1, {"k": 3584}),
        Moved("down_proj.second", "linear", "k", 1, {"n": 4096}),
    )
    assert pairs[-1].largest == (3584 * 4096 - 1) // (3584 + 4096)


def test_layers_of_other_shapes_dense_weights_and_unknown_forms() -> None:
    sites = [Site(f"{i}.up", i, "up", (Weight(f"{i}.up", 64 if i else 96, 32),)) for i in range(3)]
    assert [(choice.layers, choice.largest) for choice in choices(sites, ["low_rank"])] == [(1, 23), (2, 21)]
    assert of_llama("dense") == {}
    with pytest.raises(PlanError, match="form 'wide' is unknown"):
        of_llama("wide")


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
def test_the_command_reads_a_config(tmp_path: Path, model_type: str, expected: list[Any]) -> None:
    small_config(model_type).save_pretrained(tmp_path)
    document: Any = json.loads(run("graph", tmp_path, "--json").stdout)
    skips = [choice for choice in document["choices"] if choice["form"] == "skip"]
    assert [(skip["largest"], skip["layers"]) for skip in skips] == [(0, 1)] * 2
    others = [choice for choice in document["choices"] if choice["form"] in ("low_rank", "narrow")]
    for choice, (kind, form, largest, moved) in zip(others, expected, strict=True):
        assert (choice["kind"], choice["form"], choice["largest"]) == (kind, form, largest)
        assert [f"{axis['weight']} {axis['axis']} {axis['per_dim']}" for axis in choice["moved"]] == moved


def test_a_token_that_stays_moves_attention_and_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokens_kept(family_of(LLAMA), LLAMA, 16) == Choice(
        "KV cache",
        32,
        "tokens",
        None,
        16,
        (
            Moved("attention", "sdpa", "t", 1, {"h": 32, "kv": 8, "d": 128}),
            Moved("scores", "batched_gemm", "n", 1, {"b": 8, "k": 128}),
            Moved("mixed values", "batched_gemm", "k", 1, {"b": 8, "n": 128}),
            Moved("cache", None, None, 2048, {}),
        ),
    )
    monkeypatch.setenv("COLUMNS", "120")
    words = " ".join(run("graph", "llama-3-8b").stdout.split())
    for expected in (
        "v_proj+o_proj 32 head_dim d 1 to 127 v_proj: N = 8 d (K = 4,096)",
        "KV cache: 8 d numbers of 16 bits a token o_proj: K = 32 d (N = 4,096)",
        "KV cache 32 tokens t in steps of 16 attention: t cached tokens (H = 32, KV = 8, D = 128) scores: N = t",
    ):
        assert expected in words


def test_tokens_without_a_press_are_left_out_or_refused(tmp_path: Path) -> None:
    gemma = SHAPES["gemma-3-4b"]
    assert tokens_kept(family_of(gemma), gemma, 16).layers == 5  # layers of a sliding window do not count
    document: Any = json.loads(run("graph", "llama-3-8b", "--form", "tokens", "--json").stdout)
    assert [(choice["form"], choice["largest"]) for choice in document["choices"]] == [("tokens", None)]
    small_config("gpt2").save_pretrained(tmp_path)
    assert '"tokens"' not in run("graph", tmp_path, "--json").stdout
    assert "a gpt2, in which kvpress finds no attention with" in refused("graph", tmp_path, "--form", "tokens")
    assert "form head_dim, which fits no weight of a gpt2 model" in refused("graph", tmp_path, "--form", "head_dim")
    small_config("qwen3_5_text").save_pretrained(tmp_path)
    assert "a qwen3_5_text, in which kvpress finds no attention" in refused("graph", tmp_path, "--form", "tokens")
