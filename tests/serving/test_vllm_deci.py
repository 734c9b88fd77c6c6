"""vLLM without GAC's plugin gives the tokens of ``generate`` for a DeciLM: ``make test-vllm`` runs it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import gac
from gac.plan.plan import Plan
from tests.checkpoint.test_deci import KINDS, varied
from tests.serving.test_vllm import PYTHON, generated, run, serve

pytestmark = pytest.mark.skipif(not PYTHON, reason="needs an environment with vLLM: make test-vllm")
DOCUMENT = Path(gac.__file__).parents[1] / "docs" / "checkpoints.md"
CLASS = "configuration_decilm.DeciLMConfig"


def save_class(folder: Path) -> None:
    """Save the config's class as the documentation has it."""
    code = re.search(r"```python\n((?:(?!```).)*class DeciLMConfig.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    assert code
    (folder / "configuration_decilm.py").write_text(code[1])


@pytest.mark.parametrize("model_type", KINDS)
def test_its_tokens_are_those_of_generate(model_type: str, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    model = varied(model_type, make_plan)
    gac.export(model, tmp_path / "deci", deci=True)
    save_class(tmp_path)
    environment = {"VLLM_PLUGINS": "", "PYTHONPATH": str(tmp_path)}
    assert serve(tmp_path / "deci", environment, config_class=CLASS) == generated(model)


def test_the_class_may_lie_beside_the_weights(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    model = varied("llama", make_plan)
    gac.export(model, tmp_path / "deci", deci=True)
    environment = {"VLLM_PLUGINS": "", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    assert run(tmp_path / "deci", environment).returncode  # vLLM has no class of this config
    save_class(tmp_path / "deci")
    file = tmp_path / "deci" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": {"AutoConfig": CLASS}}))
    assert serve(tmp_path / "deci", environment, trust_remote_code=True) == generated(model)
