"""Where commands write: a device, a FIFO or a socket is refused and stays, a symlink leads to what is replaced."""

import os
import socket
import stat
from pathlib import Path

import pytest

from gac.checkpoint.target import complete_directory
from gac.core.errors import CheckpointError, GacError
from gac.core.io import complete_file, destination
from tests.cli.commands import refused, run


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


SPECIAL = {"fifo": os.mkfifo, "socket": _socket, "link": lambda path: os.symlink("/dev/null", path)}
WRITES_FILE = ("allocate m", "frontier m", "report plan.json", "eval m", "profile", "study gemm-k", "plot published")
WRITES_DIRECTORY = ("compress m --plan p", "repair d", "export d")
COMMANDS = [*WRITES_FILE, *WRITES_DIRECTORY]
KINDS = [*((command, "fifo") for command in COMMANDS), ("allocate m", "socket"), ("export d", "link")]


@pytest.mark.parametrize(("command", "kind"), KINDS)
def test_what_is_no_file_is_refused_before_any_work(
    command: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target = Path("out.svg")
    SPECIAL[kind](target)
    before = target.lstat()
    what = "directory" if command in WRITES_DIRECTORY else "regular file"
    assert f"out.svg: it exists and is no {what}; expected a writable path" in refused(*command.split(), "-o", target)
    assert (target.lstat().st_ino, target.lstat().st_mode) == (before.st_ino, before.st_mode)
    target.unlink()
    result = run(*command.split(), "-o", "-")
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "'-' names no file. Name one; with --json, the answer is on standard output." in result.stderr


@pytest.mark.parametrize("place", ["/dev/null", "/dev/zero"])
def test_a_device_is_nowhere_to_write(place: str) -> None:
    assert stat.S_ISCHR(os.stat(place).st_mode)
    with pytest.raises(FileExistsError, match="it exists and is no regular file"):
        destination(Path(place))


def test_a_file_or_directory_is_written_where_symlinks_lead(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    file, link, second = tmp_path / "far" / "plan", tmp_path / "link", tmp_path / "second"
    link.symlink_to(file)
    second.symlink_to("link")
    for text in ("first", "again"):  # at first there is no file
        with complete_file(second, "plan") as temporary:
            assert temporary.parent == file.parent
            temporary.write_text(text)
        assert (file.read_text(), link.readlink(), second.readlink()) == (text, file, Path("link"))
    (tmp_path / "empty").mkdir()
    (directory := tmp_path / "directory").symlink_to("empty")
    with complete_directory(directory) as part:
        (part / "file").touch()
    assert ((tmp_path / "empty" / "file").exists(), directory.is_symlink()) == (True, True)


def test_symlinks_in_a_circle_are_refused(tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(link)
    with pytest.raises(GacError, match="plan cannot be written"), complete_file(link, "plan"):
        pass
    with pytest.raises(CheckpointError, match="cannot be written"), complete_directory(link):
        pass
