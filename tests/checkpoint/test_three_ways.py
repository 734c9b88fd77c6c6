"""One directory, opened in a fresh process by GAC, by transformers after ``import gac``, and where there is no GAC."""

import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

from gac.checkpoint import classes as checkpoint_classes
from gac.checkpoint.classes import classes_of
from gac.models.families import supported
from gac.runtime.contract import DIGESTS
from gac.runtime.plain import modeling_gac
from tests.checkpoint.conftest import COMPANIONS
from tests.compression.applying import IDS
from tests.compression.compressed import MakePlan, compressed, small_compressed
from tests.compression.ends import with_rounded_ends
from tests.compression.stored import stored_model
from tests.models.small import small_config, small_model, weights_of

WAYS = {
    "gac.load": """
import gac
def load(place):
    model, other = gac.load(place), AutoModelForCausalLM.from_pretrained(place)
    assert type(other) is type(model)
    ids = torch.arange(40).reshape(2, 20)
    assert torch.equal(answers(other, ids)["logits"], answers(model, ids)["logits"])
    return model
""",
    "no gac": """
assert "gac" not in sys.modules
sys.modules["gac"] = None
def load(place):
    try:
        AutoConfig.from_pretrained(place)
    except ValueError as failure:
        assert "trust_remote_code=True" in str(failure)
    else:
        raise AssertionError("it was opened without trust")
    return AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
""",
}
BEFORE = """
import os
import sys
from typing import Any
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM  # before GAC, which has to register even so
"""
"""What both ways import: one process does, and splits."""
AFTER = """
child = os.fork()
way = "gac.load" if child else "no gac"
exec(ways[way])
for name in names:
    model = load(f"{folder}/{name}")
    output = answers(model, torch.arange(40).reshape(2, 20))
    model.save_pretrained(f"{folder}/{name}, again, {way}")
    save_file(output, f"{folder}/{name}, output, {way}")
sys.exit(child and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def answers(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits, and greedy tokens."""
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        return {"logits": model(input_ids=ids).logits.contiguous(), "tokens": model.generate(ids, **options)}


def fresh_process(folder: Path) -> subprocess.Popen[str]:
    known = f"folder, names, ways = {str(folder)!r}, {list(MODELS)!r}, {WAYS!r}"
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join([BEFORE, inspect.getsource(answers), known, AFTER])],
        text=True,
        env=os.environ | {"HF_MODULES_CACHE": str(folder / "modules")},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def latents(make_plan: MakePlan) -> Any:
    config, forms = small_config("mistral"), ("latent:1", "latent:2:int8", "latent:1:int4", "latent:2")
    cached = [weight.name for weight in weights_of(config) if weight.cached]
    changes = {name: (form, 8) for name, form in zip(cached, forms, strict=True)}
    changes["model.layers.0.self_attn.q_proj"] = ("low_rank", 16)
    return compressed(small_model(config), make_plan, changes)


def few_bits(make_plan: MakePlan) -> Any:
    config = small_config("llama")
    cached = [weight.name for weight in weights_of(config) if weight.cached]
    forms = (("kv_bits", 4), ("kv_bits", 3), ("latent:1:int8", 8), ("kv_bits", 8))
    return compressed(small_model(config), make_plan, dict(zip(cached, forms, strict=True)))


def with_head(model_type: str, make_plan: MakePlan) -> Any:
    config = small_config(model_type)
    config.dtype = torch.bfloat16
    return with_rounded_ends(small_model(config), make_plan)


MODELS: Mapping[str, Callable[..., Any]] = {
    "shared GEMMs": partial(small_compressed, "qwen3", fused=True),
    "Conv1D": partial(small_compressed, "gpt2"),
    "every form and storage": partial(stored_model, "olmo2"),  # skipped blocks and fewer heads, too
    "latents in 16, 8 and 4 bits": latents,
    "few bits in the cache": few_bits,
    "tied head": partial(with_head, "gemma3_text"),
}


@pytest.fixture(scope="module")
def opened(make_plan: MakePlan, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Any]]:
    """Save every model, with its output before, and start the process that opens them."""
    folder = tmp_path_factory.mktemp("saved")
    outputs = {}
    for name, make in MODELS.items():
        model = make(make_plan=make_plan)
        model.save_pretrained(folder / name)
        outputs[name] = answers(model, IDS)
    process = fresh_process(folder)
    yield {"folder": folder, "outputs": outputs, "process": process}
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_fresh_process_has_the_same_output_and_saves_the_same_files(opened: Mapping[str, Any]) -> None:
    folder, process = opened["folder"], opened["process"]
    _, errors = process.communicate()
    assert process.returncode == 0, errors[-2000:]
    for way, (name, expected) in product(WAYS, opened["outputs"].items()):
        output = load_file(folder / f"{name}, output, {way}")
        if way == "no gac":
            assert torch.allclose(output["logits"].float(), expected["logits"].float(), rtol=1e-3, atol=1e-4), name
        else:
            assert torch.equal(output["logits"], expected["logits"]), name
        assert torch.equal(output["tokens"], expected["tokens"]), name
        first, again = folder / name, folder / f"{name}, again, {way}"
        new, old = ({path.name for path in place.iterdir()} for place in (again, first))
        assert new == (old - {DIGESTS} if way == "no gac" else old)
        for file in ("config.json", *COMPANIONS):
            assert (again / file).read_text() == (first / file).read_text(), (name, file)


def test_a_checkpoint_holds_one_python_file_that_can_be_reviewed(saved: Path) -> None:
    code = Path(modeling_gac.__file__)
    (file,) = saved.glob("*.py")
    assert (file.name, file.read_bytes()) == ("modeling_gac.py", code.read_bytes())
    assert {*get_imports(code)} - sys.stdlib_module_names == {"torch", "transformers"}
    assert not get_relative_import_files(code)
    assert len(code.read_text().splitlines()) <= 490


def test_it_refuses_what_it_cannot_do(make_plan: MakePlan, tmp_path: Path) -> None:
    latents(make_plan).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tp_plan needs GAC"):
        modeling_gac.GacMistralForCausalLM.from_pretrained(tmp_path, tp_plan="auto")
    with pytest.raises(AttributeError, match="no attribute 'GacNothing'"):
        _ = modeling_gac.GacNothing
    config = modeling_gac.GacMistralConfig.from_pretrained(tmp_path)
    config.gac = config.gac | {"schema_version": 2}
    with pytest.raises(ValueError, match="schema_version 2; expected 3"):
        modeling_gac.GacMistralForCausalLM(config)
    config._attn_implementation = "vllm"
    with pytest.raises(ValueError, match="vLLM"):
        modeling_gac.GacMistralForCausalLM(config)


def test_every_architecture_has_its_classes() -> None:
    for model_type in supported():
        classes = classes_of(model_type)
        assert classes.config.model_type == f"gac_{model_type}"
        for made in (classes.config, classes.base, classes.causal_lm):
            assert getattr(checkpoint_classes, made.__name__) is made
    for name in ("GacNothing", "GacAutoModel", "GacLlamaForSequenceClassification", "Llama"):
        with pytest.raises(AttributeError, match=f"module 'gac.checkpoint.classes' has no attribute '{name}'"):
            getattr(checkpoint_classes, name)


def test_a_compressed_model_can_be_pickled(make_plan: MakePlan) -> None:
    model = small_compressed("llama", make_plan)
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    assert again.gac_plan == model.gac_plan
    assert torch.equal(answers(again, IDS)["logits"], answers(model, IDS)["logits"])
