"""vLLM without GAC's plugin gives the tokens of ``generate`` for a DeciLM: ``make test-vllm`` runs it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import gac
from gac.plan.plan import Plan
from tests.checkpoint.test_deci import KINDS, varied
from tests.serving.engine import Request, generate, needs_vllm, serve

pytestmark = needs_vllm
DOCUMENT = Path(gac.__file__).parents[1] / "docs" / "checkpoints.md"
CLASS = "configuration_decilm.DeciLMConfig"


def save_class(folder: Path) -> None:
    """Save the config's class as the documentation has it."""
    code = re.search(r"```python\n((?:(?!```).)*class DeciLMConfig.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    assert code
    (folder / "configuration_decilm.py").write_text(code[1])


def test_its_tokens_are_those_of_generate(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    requests = []
    for model_type in KINDS:
        model = varied(model_type, make_plan)
        gac.export(model, tmp_path / model_type, deci=True)
        requests.append(Request(tmp_path / model_type, expected=generate(model), config_class=CLASS))
    save_class(tmp_path)
    serve(requests, tmp_path, {"VLLM_PLUGINS": "", "PYTHONPATH": str(tmp_path)})
    for request in requests:
        assert request.answer()["tokens"] == request.expected["tokens"], request.directory


def test_the_class_may_lie_beside_the_weights(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    model = varied("llama", make_plan)
    gac.export(model, tmp_path / "deci", deci=True)
    environment = {"VLLM_PLUGINS": "", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    request = Request(tmp_path / "deci", {"trust_remote_code": True}, generate(model))
    serve([request], tmp_path, environment)
    assert "nemotron-nas" in request.log  # no class of this config
    save_class(tmp_path / "deci")
    file = tmp_path / "deci" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": {"AutoConfig": CLASS}}))
    serve([request], tmp_path, environment)
    assert request.answer()["tokens"] == request.expected["tokens"]
