"""One directory, opened in a fresh process by GAC, by transformers after ``import gac``, and where there is no GAC."""

import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.dynamic_module_utils import get_imports

import gac
from gac.checkpoint.classes import classes_of
from gac.checkpoint.standalone import source_for
from gac.models.families import supported
from gac.plan import Plan
from tests.compression.applying import IDS
from tests.compression.compressed import compressed, small_compressed
from tests.models.small import every_family, small_config, small_model, weights_of

MODELS = {
    "llama": False,
    "qwen3": True,  # with its inputs fused
    "gemma3_text": False,
    "phi3": False,
    "gpt2": False,
    "mistral": False,  # with keys and values in groups of heads, and one row in Triton where there is a GPU
}
GAC = "import gac\nmodel = gac.load(place)"
AFTER_IMPORT = (
    "import gac\nfrom transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained(place)"
)
WITHOUT_GAC = (
    "sys.modules['gac'] = None\nfrom transformers import AutoModelForCausalLM\n"
    "model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)"
)
ANSWERS = """
for name in names:
    place = f"{folder}/{name}"
    exec(way)
    said = answers(model, torch.arange(40).reshape(2, 20))
    model.save_pretrained(f"{folder}/{name}-again")
    save_file(said, f"{folder}/{name}-said")
"""


def answers(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits, and greedy tokens with and without the KV cache."""
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    with torch.no_grad():
        return {
            "logits": model(input_ids=ids).logits.contiguous(),
            "cached": model.generate(ids, **given),
            "uncached": model.generate(ids, use_cache=False, **given),
        }


def in_a_fresh_process(way: str, folder: Path, names: list[str]) -> None:
    script = "\n".join(
        [
            "import sys\nimport torch\nfrom typing import Any\nfrom safetensors.torch import save_file",
            inspect.getsource(answers),
            f"folder, names, way = {str(folder)!r}, {names!r}, {way!r}",
            ANSWERS,
        ]
    )
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def grouped(make_plan: Callable[..., Plan]) -> Any:
    config = small_config("mistral")
    changes = {weight.name: ("grouped:1", 8) for weight in weights_of(config) if weight.cached}
    changes["model.layers.0.self_attn.q_proj"] = ("low_rank", 16)
    return compressed(small_model(config), make_plan, changes, one_row=True)


@pytest.fixture(scope="module")
def saved(make_plan: Callable[..., Plan], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What each model says before it is saved, and the folder where all of them are."""
    folder = tmp_path_factory.mktemp("saved")
    said = {}
    for model_type, fused in MODELS.items():
        model = grouped(make_plan) if model_type == "mistral" else small_compressed(model_type, make_plan, fused)
        model.save_pretrained(folder / model_type)
        said[model_type] = answers(model, IDS)
    return {"folder": folder, "said": said}


@pytest.mark.parametrize("way", [GAC, AFTER_IMPORT, WITHOUT_GAC], ids=["gac.load", "import gac", "no gac"])
def test_a_fresh_process_says_the_same(way: str, saved: Mapping[str, Any]) -> None:
    folder = saved["folder"]
    in_a_fresh_process(way, folder, list(MODELS))
    for model_type, expected in saved["said"].items():
        said = load_file(folder / f"{model_type}-said")
        assert torch.equal(said["logits"], expected["logits"]), model_type
        assert torch.equal(said["cached"], expected["cached"]), model_type
        assert torch.equal(said["uncached"], expected["uncached"]), model_type
        assert torch.equal(said["cached"], said["uncached"]), model_type
        first, again = folder / model_type, folder / f"{model_type}-again"
        assert sorted(path.name for path in again.iterdir()) == sorted(path.name for path in first.iterdir())
        for file in ("config.json", "plan.json", "modeling_gac.py", "README.md"):
            assert (again / file).read_text() == (first / file).read_text(), (model_type, file)


def test_the_code_is_searched_for_imports_once(saved: Mapping[str, Any]) -> None:
    counted = (
        "from transformers import dynamic_module_utils as dynamic\ncheck, searched = dynamic.check_imports, []\n"
        "dynamic.check_imports = lambda file: searched.append(file) or check(file)\n"
    )
    in_a_fresh_process(f"{counted}{WITHOUT_GAC}\nassert len(searched) == 1, searched", saved["folder"], ["llama"])


def test_what_the_code_imports_is_found(saved: Mapping[str, Any]) -> None:
    found = get_imports(saved["folder"] / "llama" / "modeling_gac.py")
    assert [name for name in found if name not in sys.stdlib_module_names] == ["torch", "transformers"]


def test_without_gac_and_without_trust_nothing_is_opened(saved: Mapping[str, Any]) -> None:
    way = "sys.modules['gac'] = None\nfrom transformers import AutoConfig\nAutoConfig.from_pretrained(place)"
    with pytest.raises(AssertionError, match="trust_remote_code=True"):
        in_a_fresh_process(way, saved["folder"], ["llama"])


def test_what_imports_transformers_first_can_open_it_too(saved: Mapping[str, Any]) -> None:
    way = "from transformers import AutoModelForCausalLM\n" + AFTER_IMPORT
    in_a_fresh_process(way, saved["folder"], ["llama"])
    said = load_file(saved["folder"] / "llama-said")
    assert torch.equal(said["logits"], saved["said"]["llama"]["logits"])


@every_family
def test_the_code_is_small_and_names_no_module_of_gac(model_type: str) -> None:
    source = source_for(model_type)
    compile(source, "modeling_gac.py", "exec")
    assert "import gac" not in source
    assert "from gac" not in source
    assert "import triton" not in source  # transformers would ask for it
    assert len(source) < 38_000


def test_every_architecture_has_its_classes() -> None:
    for model_type in supported():
        classes = classes_of(model_type)
        assert classes.config.model_type == f"gac_{model_type}"
        assert classes.causal_lm.__name__.startswith("Gac")


def test_a_compressed_model_can_be_pickled(make_plan: Callable[..., Plan]) -> None:
    model = small_compressed("llama", make_plan)
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    assert again.gac_plan == model.gac_plan
    assert torch.equal(answers(again, IDS)["logits"], answers(model, IDS)["logits"])


def test_the_version_that_wrote_the_code_is_in_it() -> None:
    assert source_for("llama").startswith(f'"""A model that GAC {gac.__version__} compressed')
