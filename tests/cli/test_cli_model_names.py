"""A name that can be no model is refused in the same words by every command, before anything is read or asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.cli.commands import refused

NAMES = ("é", "model-", "a--b", "a/b/c", "a" * 300, "org/" + "b" * 300, "no/such/directory")
COMMANDS = ("frontier NAME", "tokens NAME", "eval NAME", "bench NAME", "profile --model NAME", "graph NAME")
CASES = [*(("allocate NAME", name) for name in NAMES), *((words, "é") for words in COMMANDS)]


@pytest.mark.parametrize(("words", "name"), CASES)
def test_a_name_that_can_be_no_model(words: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if words.startswith("tokens"):
        pytest.importorskip("kvpress")
    monkeypatch.chdir(tmp_path)
    message = f"Error: model {name!r}: no such directory; expected a directory with a config.json, a hub id like"
    assert message in refused(*(word.replace("NAME", name) for word in words.split()))


def test_what_standard_output_cannot_encode_is_escaped(tmp_path: Path, tiny_config: LlamaConfig) -> None:
    tiny_config.save_pretrained(tmp_path / "é")
    command = "import sys; from gac.cli import main; main.callback = lambda: print('é'); main(['graph', 'é'])"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(
        [sys.executable, "-c", command], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    assert (result.returncode, result.stdout[:5]) == (0, b"\\xe9\n")
