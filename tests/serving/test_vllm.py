"""vLLM with GAC's plugin gives the tokens of ``generate``: ``make test-vllm`` runs it in the engine's CPU build."""

import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gac.models.families import supported
from gac.plan.plan import Plan
from tests.compression.compressed import compressed
from tests.compression.stored import stored_model
from tests.models.small import small_config, small_model, weights_of
from tests.serving.engine import PYTHON, Request, changes, generate, needs_vllm, save, serve, shorter_values, small

pytestmark = needs_vllm
Q_PROJ = "model.layers.0.self_attn.q_proj"
FAMILIES = supported()
GROUPS = [FAMILIES[start : start + 5] for start in range(0, len(FAMILIES), 5)]
ENOUGH, TIE = 18, 0.05
"""Sequences of 20 that are equal in bfloat16, but for tokens whose log probabilities are less apart than this.

Random models have many such ties, and two kernels break them in two ways.
"""


@pytest.mark.parametrize("model_types", GROUPS, ids="-".join)
def test_its_tokens_are_those_of_generate(
    model_types: tuple[str, ...], make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    exact, rounded = {}, {}
    for model_type in model_types:
        model = compressed(small(model_type), make_plan, changes(small(model_type).config)).float()
        model.save_pretrained(tmp_path / model_type)
        exact[model_type] = Request(tmp_path / model_type, expected=generate(model))
        expected = generate(model.to(torch.bfloat16))
        rounded[model_type] = Request(tmp_path / model_type, {"dtype": "bfloat16"}, expected, name="bfloat16")
    serve([*exact.values(), *rounded.values()], tmp_path)
    for request in exact.values():
        request.assert_same()
    for request in rounded.values():
        gaps = request.gaps()
        assert sum(gap < TIE for gap in gaps) >= ENOUGH, (request.directory, gaps)


def test_layers_have_fewer_heads(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    requests = []
    for model_type in ("llama", "qwen3", "gemma3_text"):
        model = small(model_type)
        weights = [weight for weight in weights_of(model.config) if weight.groups]
        fewer = {weight.name: ("heads", 1) for weight in weights if weight.name.split(".")[2] in ("0", "3")}
        model = compressed(model, make_plan, changes(model.config) | fewer).float()
        model.save_pretrained(tmp_path / model_type)
        requests.append(Request(tmp_path / model_type, expected=generate(model)))
    serve(requests, tmp_path)
    for request in requests:
        request.assert_same()


def test_a_compiled_model_gives_the_same_tokens(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    requests = [
        save(small(model_type), make_plan, tmp_path / model_type, enforce_eager=False)
        for model_type in ("llama", "gemma3_text", "olmo2")
    ]
    serve(requests, tmp_path)
    for request in requests:
        request.assert_same()


def pairs(make_plan: Callable[..., Plan]) -> Any:
    return compressed(small_model(small_config("llama")), make_plan, {Q_PROJ: ("low_rank", 16)})


def newer_schema(config: dict[str, Any]) -> None:
    config["gac"]["schema_version"] = 99


def unknown_module(config: dict[str, Any]) -> None:
    config["gac"]["modules"][Q_PROJ]["module"] = "Butterfly"


def no_key(config: dict[str, Any]) -> None:
    del config["gac"]


def unedited(config: dict[str, Any]) -> None:
    pass


FP8 = {"quantization": "fp8", "dtype": "bfloat16"}
REFUSED: dict[str, tuple[Callable[..., Any], Callable[[dict[str, Any]], None], dict[str, Any], str]] = {
    "values": (shorter_values, unedited, {}, "layers.1.self_attn.v_proj has form head_dim, which vLLM does not run"),
    "stored": (
        partial(stored_model, "llama"),
        unedited,
        {},
        "has scheme w4a16, which vLLM does not run; ",
    ),
    "newer": (pairs, newer_schema, {}, "schema_version is 99; expected 3. Open it with the version"),
    "unknown": (pairs, unknown_module, {}, "q_proj is 'Butterfly', which this version of GAC does not know"),
    "dense": (pairs, no_key, {}, "config.json has no key gac; expected a model that GAC compressed"),
    "stages": (pairs, unedited, {"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2; expected 1"),
    "quantised": (pairs, unedited, FP8, "quantization fp8 of a compressed model; expected none"),
}


def test_what_the_engine_does_not_run_is_named(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    requests = {}
    for name, (make, edit, options, _) in REFUSED.items():
        make(make_plan=make_plan).save_pretrained(tmp_path / name)
        path = tmp_path / name / "config.json"
        config = json.loads(path.read_text())
        edit(config)
        path.write_text(json.dumps(config))
        requests[name] = Request(tmp_path / name, options)
    serve(requests.values(), tmp_path)
    for name, (*_, message) in REFUSED.items():
        log = requests[name].log
        assert log.count(message) == 1
        assert message in log.splitlines()[-1]


def test_an_engine_without_the_plugin_says_what_to_install(
    make_plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "")
    pairs(make_plan).save_pretrained(tmp_path)
    request = Request(tmp_path, {"trust_remote_code": True})
    serve([request], tmp_path)
    assert "for vLLM run: pip install gpu-aligned-compression" in request.log


REGISTERED_TWICE = """
import sys, vllm
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from gac.runtime.vllm import register

register()
first = dict(vllm.ModelRegistry.models), dict(_CONFIG_REGISTRY)
register()
assert first == (dict(vllm.ModelRegistry.models), dict(_CONFIG_REGISTRY))
assert "GacLlamaForCausalLM" in first[0]
assert not sys.modules.keys() & {"gac.runtime.vllm.model", "gac.runtime.modules", "gac.plan", "msgspec"}
"""


def test_the_plugin_is_registered_twice_and_loads_no_model() -> None:
    done = subprocess.run([PYTHON, "-c", REGISTERED_TWICE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_kernels_between_gemms_give_what_the_engine_does() -> None:
    script, interpreted = Path(__file__).with_name("vllm_kernels.py"), os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([PYTHON, script], env=interpreted, capture_output=True, text=True, check=False)
    assert done.stdout.split()[-1:] == ["equal"], done.stderr


def test_another_version_of_the_engine_is_a_warning() -> None:
    code = (
        "import vllm; vllm.__version__ = '9.0'; from gac.runtime.vllm.check import warn_of_version; warn_of_version()"
    )
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert "vLLM 9.0; GAC's plugin was tested with 0.26 and 0.32" in done.stderr
