"""vLLM without GAC's plugin gives the tokens of ``generate`` for a DeciLM: ``make test-vllm`` runs it."""

from collections.abc import Callable
from pathlib import Path

import pytest

import gac
from gac.plan.plan import Plan
from tests.checkpoint.test_deci import KINDS, varied
from tests.serving.test_vllm import PYTHON, generated, serve

pytestmark = pytest.mark.skipif(not PYTHON, reason="needs an environment with vLLM: make test-vllm")


@pytest.mark.parametrize("model_type", KINDS)
def test_its_tokens_are_those_of_generate(model_type: str, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    model = varied(model_type, make_plan)
    gac.export(model, tmp_path / "deci", deci=True)
    environment = {"VLLM_PLUGINS": "", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    assert serve(tmp_path / "deci", environment, trust_remote_code=True) == generated(model)
