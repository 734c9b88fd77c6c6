"""One directory, opened in a fresh process by GAC, by transformers after ``import gac``, and where there is no GAC."""

import inspect
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

from gac import runtime
from gac.checkpoint import classes as checkpoint_classes
from gac.checkpoint.classes import classes_of
from gac.models.families import supported
from gac.plan.plan import Plan
from gac.runtime.compressed import CODE, COMPANIONS
from gac.runtime.contract import DIGESTS
from tests.compression.applying import IDS
from tests.compression.compressed import compressed, small_compressed
from tests.compression.stored import stored_model
from tests.models.small import small_config, small_model, weights_of

MODELS = {
    "llama": False,
    "qwen3": True,  # with its inputs fused
    "gpt2": False,
    "olmo2": False,  # with weights of few bits
    "mistral": False,  # with keys and values in groups of heads, and one row in Triton where there is a GPU
}
WAYS = {
    "gac.load": """
from transformers import AutoModelForCausalLM  # before GAC, which has to register even so
import gac
def load(place):
    model = gac.load(place)
    assert type(AutoModelForCausalLM.from_pretrained(place)) is type(model)
    return model
""",
    "import gac": """
import gac
from transformers import AutoModelForCausalLM
load = AutoModelForCausalLM.from_pretrained
""",
    "no gac": """
sys.modules["gac"] = None
from transformers import AutoConfig, AutoModelForCausalLM, dynamic_module_utils as dynamic
check, searched = dynamic.check_imports, []
dynamic.check_imports = lambda file: searched.append(file) or check(file)
def load(place):
    searched.clear()
    try:
        AutoConfig.from_pretrained(place)
    except ValueError as failure:
        assert "trust_remote_code=True" in str(failure)
    else:
        raise AssertionError("it was opened without trust")
    model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
    assert len(searched) == 1, searched
    return model
""",
}
ANSWERS = """
for name in names:
    model = load(f"{folder}/{name}")
    said = answers(model, torch.arange(40).reshape(2, 20))
    model.save_pretrained(f"{folder}/{name}, again, {way}")
    save_file(said, f"{folder}/{name}, said, {way}")
"""


def answers(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits, and greedy tokens."""
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        return {
            "logits": model(input_ids=ids).logits.contiguous(),
            "tokens": model.generate(ids, **given),
        }


def fresh_process(way: str, folder: Path) -> subprocess.Popen[str]:
    script = "\n".join(
        [
            "import sys\nimport torch\nfrom typing import Any\nfrom safetensors.torch import save_file",
            inspect.getsource(answers),
            f"folder, names, way = {str(folder)!r}, {list(MODELS)!r}, {way!r}",
            WAYS[way],
            ANSWERS,
        ]
    )
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules")}
    return subprocess.Popen(
        [sys.executable, "-c", script], text=True, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def grouped(make_plan: Callable[..., Plan]) -> Any:
    config = small_config("mistral")
    changes = {weight.name: ("latent:1", 8) for weight in weights_of(config) if weight.cached}
    changes["model.layers.0.self_attn.q_proj"] = ("low_rank", 16)
    return compressed(small_model(config), make_plan, changes)


OWN: Mapping[str, Callable[..., Any]] = {"mistral": grouped, "olmo2": partial(stored_model, "olmo2")}


@pytest.fixture(scope="module")
def saved(make_plan: Callable[..., Plan], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Any]]:
    """What each model says before it is saved, the folder where all of them are, and the processes that open them."""
    folder = tmp_path_factory.mktemp("saved")
    said = {}
    for model_type, fused in MODELS.items():
        model = OWN[model_type](make_plan) if model_type in OWN else small_compressed(model_type, make_plan, fused)
        model.save_pretrained(folder / model_type)
        said[model_type] = answers(model, IDS)
    processes = {way: fresh_process(way, folder) for way in WAYS}
    yield {"folder": folder, "said": said, "processes": processes}
    for process in processes.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("way", WAYS)
def test_a_fresh_process_says_the_same(way: str, saved: Mapping[str, Any]) -> None:
    folder, process = saved["folder"], saved["processes"][way]
    _, errors = process.communicate()
    assert process.returncode == 0, errors[-2000:]
    for model_type, expected in saved["said"].items():
        said = load_file(folder / f"{model_type}, said, {way}")
        assert torch.equal(said["logits"], expected["logits"]), model_type
        assert torch.equal(said["tokens"], expected["tokens"]), model_type
        first, again = folder / model_type, folder / f"{model_type}, again, {way}"
        new, old = ({path.name for path in place.iterdir()} for place in (again, first))
        assert new == (old - {DIGESTS} if way == "no gac" else old)
        for file in ("config.json", *COMPANIONS):
            assert (again / file).read_text() == (first / file).read_text(), (model_type, file)


def test_the_code_is_the_runtimes_own(saved: Mapping[str, Any]) -> None:
    own = Path(runtime.__file__).parent
    for name in CODE:
        assert (saved["folder"] / "llama" / name).read_bytes() == (own / name).read_bytes()
    needed = {Path(file).name for file in get_relative_import_files(own / "modeling_gac.py")}
    assert {"modeling_gac.py", *needed} == {*CODE} == {path.name for path in own.glob("*.py")} - {"__init__.py"}


@pytest.mark.parametrize("name", CODE)
def test_the_code_imports_torch_transformers_and_itself(name: str) -> None:
    """Triton is imported by name where it is installed: transformers would ask for it."""
    source = Path(runtime.__file__).with_name(name)
    assert {*get_imports(source)} - sys.stdlib_module_names <= {"torch", "transformers"}
    assert {found.partition(".")[0] for found in re.findall(r'import_module\("(\S+)"', source.read_text())} <= {
        "triton"
    }


def test_every_architecture_has_its_classes() -> None:
    for model_type in supported():
        classes = classes_of(model_type)
        assert classes.config.model_type == f"gac_{model_type}"
        for one in (classes.config, classes.base, classes.causal_lm):
            assert getattr(checkpoint_classes, one.__name__) is one


@pytest.mark.parametrize("name", ["GacNothing", "GacAutoModel", "GacLlamaForSequenceClassification", "Llama"])
def test_a_class_that_is_none_is_named(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'gac.checkpoint.classes' has no attribute '{name}'"):
        getattr(checkpoint_classes, name)


def test_a_compressed_model_can_be_pickled(make_plan: Callable[..., Plan]) -> None:
    model = small_compressed("llama", make_plan)
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    assert again.gac_plan == model.gac_plan
    assert torch.equal(answers(again, IDS)["logits"], answers(model, IDS)["logits"])
