"""Servers of models, started and queried as the documentation says."""

import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
_LINES = re.findall(r"^(\w+ serve small\b[^#\n]*)", PAGE, re.MULTILINE)
COMMANDS = {line.split()[0]: line.split()[1:] for line in _LINES}
"""The arguments that start each server in the folder where the checkpoint ``small`` is, by the name of the program."""
CLIENT = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "import OpenAI" in block)
PORT, SECONDS = 8000, 600


@contextmanager
def running(command: list[str], folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[int]:
    """The port of a server that answers, and that is stopped in the end with all it has started."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    offline = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules"), **(environment or {})}
    # No GAC but one that is installed where the server is.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--host", "localhost", "--port", str(port)],
            cwd=folder,
            env=inherited | offline,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(server, port, folder / "server.log")
        yield port
    finally:
        _stop(server)


def _wait(server: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    end = time.monotonic() + SECONDS
    while not _answers(port):
        assert server.poll() is None, log.read_text(errors="replace")[-4000:]
        assert time.monotonic() < end, log.read_text(errors="replace")[-4000:]
        time.sleep(0.5)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _stop(server: "subprocess.Popen[bytes]") -> None:
    for way in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, way)
            server.wait(30)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def said(port: int, prompts: list[str], tokens: int) -> list[str]:
    """What the server answers to each prompt, greedily."""
    from openai import OpenAI

    client = OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none")
    asked = {"model": "small", "max_tokens": tokens, "temperature": 0}
    return [client.completions.create(prompt=prompt, **asked).choices[0].text for prompt in prompts]


def printed_by_the_client(port: int) -> str:
    """What the documented client prints, asking this server."""
    assert str(PORT) in CLIENT
    with redirect_stdout(StringIO()) as printed:
        exec(CLIENT.replace(str(PORT), str(port)), {})
    return printed.getvalue()
