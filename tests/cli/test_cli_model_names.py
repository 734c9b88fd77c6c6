"""A name that can be no model is refused in the same words by every command, before anything is read or asked for."""

from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from gac.cli import main
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


def test_what_standard_output_cannot_encode_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr(main, "callback", lambda: print("é"))
    with pytest.raises(SystemExit) as ended:
        main(["profiles", "--help"])
    stream.flush()
    assert (ended.value.code, b"\\xe9\n" in stream.buffer.getvalue()) == (0, True)  # type: ignore[attr-defined]
