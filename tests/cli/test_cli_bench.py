"""The command that times whole models, as far as it goes without a GPU."""

import json

import pytest
from commands import run


@pytest.mark.parametrize(
    ("options", "part", "words"),
    [
        (("--workload", "decode:1x8"), "given", "workload 'decode:1x8'"),
        ((), "expected", "an NVIDIA GPU to measure"),
    ],
)
def test_what_cannot_be_timed(options: tuple[str, ...], part: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("bench", "--shapes", "llama-3-8b", *options, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"][part] == words
