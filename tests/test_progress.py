"""Progress: bars on a terminal, a line a minute in files and pipes, and nothing on request."""

from typing import Any

import pytest

from gac.core import progress
from gac.core.progress import no_progress, progress_bar


def _work(shown: bool = True) -> None:
    for _ in progress_bar("fitting", "layer", steps=range(3), shown=shown):
        pass
    with progress_bar("calibrating", "window", 0, shown=shown) as bar:
        bar.reset(2)
        bar.update()


def test_lines_in_files_bars_on_terminals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _work()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress, "_SECONDS", 0.0)  # print at every update
    _work()
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("fitting: 0 of 3 layers after 00:00, about ? left\n")
    assert "calibrating: 0 of 2 windows after 00:00, about ? left\n" in error
    assert "\r" not in error
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    _work()
    error = capsys.readouterr().err
    assert "\rfitting: " in error
    assert "3/3" in error


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_on_request(terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    with no_progress():
        _work()
    _work(shown=False)
    assert capsys.readouterr().err == ""
