"""``transformers serve`` says what the model itself says."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers.utils.import_utils import is_serve_available

from gac.plan.plan import Plan
from tests.serving.servers import COMMANDS, printed_by_the_client, running, said
from tests.serving.wordy import TOKENS, prompts, wordy

pytestmark = pytest.mark.skipif(not is_serve_available(), reason="needs fastapi, uvicorn and openai: gac[serving]")


def test_the_readme_names_both_servers() -> None:
    assert set(COMMANDS) == {"transformers", "vllm"}


def test_its_tokens_are_those_of_generate(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    model = wordy("llama", make_plan)
    model.save(tmp_path / "small")
    program = str(Path(sys.executable).with_name("transformers"))
    with running([program, *COMMANDS["transformers"]], tmp_path) as port:
        assert said(port, prompts(), TOKENS) == [model.says(prompt) for prompt in prompts()]
        assert printed_by_the_client(port).strip() == model.says("Heat is", 32)
