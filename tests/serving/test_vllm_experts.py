"""Mixtures of experts in vLLM give the tokens of generate: make test-vllm runs it."""

import subprocess
from pathlib import Path

from gac.runtime.vllm.check import SERVED_MIXTURES
from tests.compression.compressed import MakePlan
from tests.serving.engine import PYTHON, Request, needs_vllm, prompts, serve
from tests.serving.mixtures import changes, in_fp8, mixed, mixture, saved, saved_narrower

pytestmark = needs_vllm
WIDTHS = (32, 40, 48, 24)


def test_their_tokens_are_those_of_generate(make_plan: MakePlan, tmp_path: Path) -> None:
    requests = []
    for model_type in SERVED_MIXTURES:
        config = mixture(model_type).config
        for name, chosen in (("compressed", changes(config)), ("dense", {})):
            model = mixed(mixture(model_type), make_plan, chosen)
            requests.append(saved(model, tmp_path / f"{model_type}-{name}"))
    for model_type in ("mixtral", "qwen3_moe"):
        dense = mixture(model_type, mlp_only_layers=[])
        model = mixed(dense, make_plan, changes(dense.config))
        requests.append(saved_narrower(model, WIDTHS, tmp_path / f"{model_type}-narrower"))
    serve(requests, tmp_path)
    for request in requests:
        assert request.answer()["tokens"] == request.expected["tokens"], request.directory


def test_experts_in_fp8_give_the_tokens_of_generate(make_plan: MakePlan, tmp_path: Path) -> None:
    requests = []
    for model_type in ("qwen3_moe", "mixtral", "gpt_oss"):
        dense = mixture(model_type)
        model = mixed(dense, make_plan, changes(dense.config), in_fp8(dense.config))
        requests.append(saved(model, tmp_path / model_type))
    requests.append(Request(tmp_path / "qwen3_moe", {"load_format": "dummy"}, name="dummy", prompts=prompts()[:2]))
    serve(requests, tmp_path)
    for request in requests[:-1]:
        assert request.answer()["tokens"] == request.expected["tokens"], request.directory
    assert len(requests[-1].answer()["tokens"]) == 2


NEAREST = """
from vllm.model_executor.layers.fused_moe import fused_moe
from gac.runtime.vllm.tuned import nearest_sizes, use_nearest_configs

def name(experts, width, dtype=None, block=None):
    return f"E={experts},N={width},device_name=NVIDIA_H200" + (f",dtype={dtype}" if dtype else "") + ".json"

fused_moe.get_config_file_name = name
assert fused_moe.get_moe_configs(96, 640, None) is None
tuned = fused_moe.get_moe_configs(64, 640, None)
use_nearest_configs()
use_nearest_configs()
assert fused_moe.get_moe_configs(96, 640, None) == tuned
assert nearest_sizes(name(128, 768)) == (128, 768)
assert nearest_sizes(name(112, 768)) == (128, 768)
assert nearest_sizes(name(2, 16)) is None
assert nearest_sizes("E=96,N=640,device_name=Toaster.json") is None
"""


def test_sizes_that_nobody_tuned_take_the_configs_of_the_nearest() -> None:
    done = subprocess.run([PYTHON, "-c", NEAREST], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
