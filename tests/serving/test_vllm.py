"""vLLM with GAC's plugin, and without it a DeciLM, gives the tokens of generate: make test-vllm runs it."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPImageProcessor, LlavaProcessor

import gac
from gac.models.families import supported
from gac.runtime.modules import LowRankLinear
from gac.runtime.vllm.check import NOT_SERVED
from gac.testing.models import tiny_tokenizer
from tests.changed import edited
from tests.checkpoint.test_deci import KINDS, varied
from tests.compression.compressed import MakePlan, compressed
from tests.compression.ends import with_rounded_ends
from tests.models.small import small_config, small_model, weights_of
from tests.models.wrappers import wrapper_config, wrapper_model
from tests.serving import engine
from tests.serving.engine import (
    EXACT,
    LAYERS,
    PYTHON,
    Request,
    assert_served,
    changes,
    generate,
    generate_from,
    needs_torchvision,
    needs_vllm,
    save,
    serve,
    small,
)

pytestmark = needs_vllm
Q_PROJ = "model.layers.0.self_attn.q_proj"
FAMILIES = [name for name in supported() if name not in NOT_SERVED]
GROUPS = [FAMILIES[start : start + 5] for start in range(0, len(FAMILIES), 5)]
ENOUGH, TIE = 18, 0.05
"""Sequences of 20 that are equal in bfloat16, but for tokens whose log probabilities are less apart than this.

Random models have many such ties, and two kernels break them in two ways.
"""


@pytest.mark.parametrize("model_types", GROUPS, ids="-".join)
def test_its_tokens_are_those_of_generate(model_types: tuple[str, ...], make_plan: MakePlan, tmp_path: Path) -> None:
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


@needs_torchvision
def test_decoders_of_multimodal_models_give_the_tokens_of_generate(make_plan: MakePlan, tmp_path: Path) -> None:
    sizes, requests = {"num_hidden_layers": LAYERS, "hidden_size": 128, "head_dim": 32}, []
    for name in ("gemma3", "mistral3", "qwen3_vl"):
        model = wrapper_model(wrapper_config(name, text_config=sizes))
        requests.append(save(model, make_plan, tmp_path / name, limit_mm_per_prompt={"image": 0, "video": 0}))
    assert_served(requests, tmp_path)


@needs_torchvision
def test_images_give_the_tokens_of_generate(make_plan: MakePlan, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": 128, "head_dim": 32, "vocab_size": len(tokenizer)}
    config = wrapper_config("llava", text_config=sizes, image_token_index=len(tokenizer) - 1)
    model: Any = compressed(wrapper_model(config), make_plan, changes(config)).float()
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    for part in (model, processor):
        part.save_pretrained(tmp_path)
    images, tokens, logprobs, text = [], [], [], "<image> is"
    for number in range(3):
        images.append(tmp_path / f"{number}.png")
        Image.effect_noise((28, 28), 20 + 60 * number).convert("RGB").save(images[-1])
        done = generate_from(model, **processor(text=text, images=Image.open(images[-1]), return_tensors="pt"))
        tokens.append(done[0])
        logprobs.append(done[1])
    options = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}}
    request = Request(tmp_path, options, prompts=[tokenizer(text)["input_ids"]] * len(images), images=images)
    serve([request], tmp_path)
    answer = request.answer()
    assert answer["tokens"] == tokens
    for written, others in zip(answer["logprobs"], logprobs, strict=True):
        assert written == pytest.approx(others, abs=EXACT)
    assert logprobs[0] != pytest.approx(logprobs[1], abs=3 * EXACT)  # the image is looked at


def test_weights_in_schemes_give_the_tokens_of_generate(make_plan: MakePlan, tmp_path: Path) -> None:
    names = ("llama", "qwen2", "phi3")
    requests = [engine.in_schemes(name, make_plan, tmp_path / name) for name in names]
    requests.append(engine.in_schemes("llama", make_plan, tmp_path / "compiled", enforce_eager=False))
    divided = ("w4a16:8", "w8a16", "w8a16:8", "w4a16:8", "w8a16", "w4a16:8")
    for name in ("llama", "phi3"):
        folder = tmp_path / f"{name}-divided"
        requests.append(engine.in_schemes(name, make_plan, folder, divided, tensor_parallel_size=2))
    assert_served(requests, tmp_path)


def test_embeddings_and_heads_in_a_storage_give_the_tokens_of_generate(make_plan: MakePlan, tmp_path: Path) -> None:
    requests = []
    for name, folder, options in (
        ("llama", "apart", {}),
        ("llama", "divided", {"tensor_parallel_size": 2}),
        ("gemma3_text", "tied", {}),
        ("gemma3_text", "compiled", {"enforce_eager": False}),
    ):
        model = with_rounded_ends(small(name), make_plan).float()
        model.save_pretrained(tmp_path / folder)
        requests.append(Request(tmp_path / folder, options, generate(model)))
    serve(requests, tmp_path)
    for request in requests:
        assert request.answer()["tokens"] == request.expected["tokens"], request.directory


def test_groups_that_processes_do_not_divide_are_named(make_plan: MakePlan, tmp_path: Path) -> None:
    request = engine.in_schemes("llama", make_plan, tmp_path, ["w4a16:128"] * engine.LAYERS, tensor_parallel_size=2)
    serve([request], tmp_path)
    assert "expected whole groups and words on each of 2 processes. Make the plan" in request.log


def test_layers_have_fewer_heads(make_plan: MakePlan, tmp_path: Path) -> None:
    requests = []
    for model_type in ("llama", "qwen3", "gemma3_text"):
        model = small(model_type)
        weights = [weight for weight in weights_of(model.config) if weight.groups]
        fewer = {weight.name: ("heads", 1) for weight in weights if weight.name.split(".")[2] in ("0", "3")}
        model = compressed(model, make_plan, changes(model.config) | fewer).float()
        model.save_pretrained(tmp_path / model_type)
        requests.append(Request(tmp_path / model_type, expected=generate(model)))
    assert_served(requests, tmp_path)


def test_a_compiled_model_gives_the_same_tokens(make_plan: MakePlan, tmp_path: Path) -> None:
    names = ("llama", "gemma3_text", "olmo2")
    assert_served((save(small(name), make_plan, tmp_path / name, enforce_eager=False) for name in names), tmp_path)


def pairs(make_plan: MakePlan) -> Any:
    return compressed(small_model(small_config("llama")), make_plan, {Q_PROJ: ("low_rank", 16)})


def unedited(config: dict[str, Any]) -> None:
    pass


def with_value(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Change what lies under these keys of a compressed model's part of a config."""

    def edit(config: dict[str, Any]) -> None:
        part = config["gac"]
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = value

    return edit


FP8 = {"quantization": "fp8", "dtype": "bfloat16"}
NEWER, UNKNOWN = with_value("schema_version", value=99), with_value("modules", Q_PROJ, "module", value="Butterfly")
REFUSED: dict[str, tuple[Callable[..., Any], Callable[[dict[str, Any]], Any], dict[str, Any], str]] = {
    "values": (engine.shorter_values, unedited, {}, "1.self_attn.v_proj has form head_dim, which vLLM does not run"),
    "newer": (pairs, NEWER, {}, "schema_version is 99; expected 3. Open it with the version"),
    "unknown": (pairs, UNKNOWN, {}, "q_proj is 'Butterfly', which this version of GAC does not know"),
    "dense": (pairs, lambda config: config.pop("gac"), {}, "config.json has no key gac; expected a model that GAC"),
    "stages": (pairs, unedited, {"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2; expected 1"),
    "quantised": (pairs, unedited, FP8, "quantization fp8 of a compressed model; expected none"),
}


def test_what_the_engine_does_not_run_is_named(make_plan: MakePlan, tmp_path: Path) -> None:
    requests = {}
    for name, (make, edit, options, _) in REFUSED.items():
        make(make_plan=make_plan).save_pretrained(tmp_path / name)
        with edited(tmp_path / name / "config.json") as config:
            edit(config)
        requests[name] = Request(tmp_path / name, options)
    serve(requests.values(), tmp_path)
    for name, (*_, message) in REFUSED.items():
        log = requests[name].log
        assert log.count(message) == 1
        assert message in log.splitlines()[-1]


def test_an_engine_without_the_plugin_says_what_to_install(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_two_processes_give_the_tokens_of_one(make_plan: MakePlan, tmp_path: Path) -> None:
    # One matrix of q, k and v; a sum of attention and MLP at once; vLLM's Transformers backend.
    model_types = ("llama", "qwen3", "gemma3_text", "phi3", "cohere", "olmo2")
    requests = [save(small(name), make_plan, tmp_path / name, tensor_parallel_size=2) for name in model_types]
    assert_served(requests, tmp_path)


def test_fewer_key_value_heads_than_processes_are_shared(make_plan: MakePlan, tmp_path: Path) -> None:
    assert_served([save(small("llama", num_key_value_heads=1), make_plan, tmp_path, tensor_parallel_size=2)], tmp_path)


def test_a_width_that_processes_do_not_divide_is_named(make_plan: MakePlan, tmp_path: Path) -> None:
    model = small("llama")
    names = [f"model.layers.2.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    compressed(model, make_plan, dict.fromkeys(names, ("narrow", 97))).save_pretrained(tmp_path)
    request = Request(tmp_path, {"tensor_parallel_size": 2})
    serve([request], tmp_path)
    assert "layers.2.mlp.gate_up_proj has 97 features; expected a multiple of 2 processes" in request.log


RANK, ALPHA = 4, 8


def with_adapter(model: Any, folder: Path) -> Any:
    """Save an adapter of random numbers, made by peft for linear layers, with low-rank pairs beside them."""
    peft = pytest.importorskip("peft", exc_type=ImportError)
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    pairs = {name: module for name, module in model.named_modules() if isinstance(module, LowRankLinear)}
    targets = sorted(name for name in names if name.rpartition(".")[0] not in pairs and name != "lm_head")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets))
    torch.manual_seed(2)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, pair in pairs.items():
        first, second = torch.randn(RANK, pair.in_features) * 0.1, torch.randn(pair.out_features, RANK) * 0.1
        tensors[f"base_model.model.{name}.lora_A.weight"] = first
        tensors[f"base_model.model.{name}.lora_B.weight"] = second
        pair.register_forward_hook(added(first, second))
    save_file(tensors, folder / "adapter_model.safetensors")
    return adapted


def added(first: Tensor, second: Tensor) -> Callable[..., Tensor]:
    def hook(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output + ALPHA / RANK * (inputs[0] @ first.T @ second.T)

    return hook


def test_an_adapter_gives_the_tokens_of_peft(make_plan: MakePlan, tmp_path: Path) -> None:
    requests = []
    for model_type in ("llama", "qwen3", "olmo2"):
        folder = tmp_path / model_type
        model = compressed(small(model_type), make_plan, changes(small(model_type).config)).float()
        model.save_pretrained(folder)
        plain = generate(model)
        adapted = with_adapter(model, folder / "adapter")
        request = Request(folder, {"enable_lora": True, "max_lora_rank": 8}, generate(adapted), folder / "adapter")
        assert request.expected["tokens"] != plain["tokens"]
        requests.append(request)
    assert_served(requests, tmp_path)


DOCUMENT = Path(gac.__file__).parents[1] / "docs" / "checkpoints.md"
CLASS = "configuration_decilm.DeciLMConfig"


def save_class(folder: Path) -> None:
    """Save the config's class as the documentation has it."""
    code = re.search(r"```python\n((?:(?!```).)*class DeciLMConfig.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    assert code
    (folder / "configuration_decilm.py").write_text(code[1])


def test_tokens_of_a_decilm_are_those_of_generate(make_plan: MakePlan, tmp_path: Path) -> None:
    requests = []
    for model_type in KINDS:
        model = varied(model_type, make_plan)
        gac.export(model, tmp_path / model_type, deci=True)
        requests.append(Request(tmp_path / model_type, expected=generate(model), config_class=CLASS))
    save_class(tmp_path)
    serve(requests, tmp_path, {"VLLM_PLUGINS": "", "PYTHONPATH": str(tmp_path)})
    for request in requests:
        assert request.answer()["tokens"] == request.expected["tokens"], request.directory


def test_the_class_may_lie_beside_the_weights(make_plan: MakePlan, tmp_path: Path) -> None:
    model = varied("llama", make_plan)
    gac.export(model, tmp_path / "deci", deci=True)
    environment = {"VLLM_PLUGINS": "", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    request = Request(tmp_path / "deci", {"trust_remote_code": True}, generate(model))
    serve([request], tmp_path, environment)
    assert "nemotron-nas" in request.log  # no class of this config
    save_class(tmp_path / "deci")
    with edited(tmp_path / "deci" / "config.json") as config:
        config["auto_map"] = {"AutoConfig": CLASS}
    serve([request], tmp_path, environment)
    assert request.answer()["tokens"] == request.expected["tokens"]
