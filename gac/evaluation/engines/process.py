"""A process that holds one model in an engine: both ends of its pipes, and the errors that it ends with.

A call is a line of JSON, ``{"call": name, "arguments": {...}}``, and so is its answer: ``{"result": {...}}``, or
``{"error": text}``.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Self

from gac.core.errors import GacError

_LINES, _LETTERS, _MESSAGE, _TAIL = 12, 160, 600, 2**16
_MEMORY = (
    "out of memory|No available memory|Free memory on device|is less than desired|larger than the available KV cache"
    "|KV cache holds"
)
_CAUSES = (
    (
        "No module named '(vllm|torch)'",
        "vLLM in the environment of {python}",
        "Install it there with pip install vllm, or name the Python of another environment: --engine-python PATH.",
    ),
    (
        "No module named 'gac",
        "GAC beside vLLM in the environment of {python}",
        "Install it there: pip install gpu-aligned-compression.",
    ),
    (
        _MEMORY,
        "room for its weights, and for the KV cache of the workloads",
        "Name smaller workloads, or free memory that other processes use.",
    ),
)
"""Pattern in what the engine says, what was expected, and the remedy."""


class EngineError(GacError):
    """An error of the process that holds a model: the engine does not run it, or has ended.

    Attributes:
        lacks_memory: more memory would help.
    """

    def __init__(self, name: str, message: str, lines: Sequence[str], python: str) -> None:
        text = "\n".join((message, *lines))
        self.lacks_memory = re.search(_MEMORY, text) is not None
        causes = (cause[1:] for cause in _CAUSES if re.search(cause[0], text))
        expected, remedy = next(
            ((expected.format(python=python), remedy) for expected, remedy in causes),
            ("a model and options that this engine runs", f"vllm serve {name} shows all that the engine says."),
        )
        shown = " ".join(message.split()).rstrip(".")
        shown = shown if len(shown) <= _MESSAGE else f"{shown[:_MESSAGE]}..."
        tail = "".join(f"\n  {line}" for line in lines)
        super().__init__(f"{name} in vLLM: {shown}", expected, f"{remedy}{' Last lines:' * bool(tail)}{tail}")


class Worker:
    """A process of an engine with pipes of its own, and its output in a file without a name.

    It is a context manager: at its end the process and all that it started are killed.

    Args:
        name: of the model, for errors.
        command: its Python and what that runs; descriptors of calls and answers are appended.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self._python = name, command[0]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed at the end
        calls, self._calls = os.pipe()
        self._answers, answers = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, str(calls), str(answers)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(calls, answers),
                start_new_session=True,  # an interrupt at the terminal reaches this process, which then kills it
            )
        except OSError as failure:
            self._close()
            problem = f"{self._python} cannot be started: {failure.strerror}"
            raise GacError(problem, "the Python of an environment with vLLM and GAC", "Check the path.") from failure
        finally:
            os.close(calls)
            os.close(answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._close()

    def _close(self) -> None:
        for descriptor in (self._calls, self._answers):
            os.close(descriptor)
        self._log.close()

    def call(self, function: str, **arguments: Any) -> Any:
        """Call a function of the process; an EngineError if it fails, or the process has ended."""
        line = json.dumps({"call": function, "arguments": arguments}) + "\n"
        with suppress(BrokenPipeError):
            os.write(self._calls, line.encode())
        text = self._answer()
        if not text:
            status = self._process.wait()
            ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            raise self.error(f"the process {ended}")
        answer = json.loads(text)
        if "error" in answer:
            raise self.error(answer["error"])
        return answer["result"]

    def error(self, message: str) -> EngineError:
        """Make an error of this model, with the last lines that the process has printed."""
        return EngineError(self.name, message, self._last_lines(), self._python)

    def _answer(self) -> bytes:
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):
            part = os.read(self._answers, 2**16)
            if not part:
                return b""
            parts.append(part)
        return b"".join(parts)

    def _last_lines(self) -> list[str]:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _TAIL))
        lines = self._log.read().decode(errors="replace").replace("\r", "\n").splitlines()
        return [line[:_LETTERS] for line in lines if line.strip()][-_LINES:]


def worker_command(python: str | Path | None) -> list[str]:
    """Return the command of a worker with vLLM: by another environment's Python, or by the one that runs this."""
    # The directory that the user works in may hold anything: Python imports from it only where this one does.
    safe = [] if {"", os.getcwd()} & {*sys.path} else ["-P"]
    return [str(python or sys.executable), *safe, "-m", "gac.evaluation.engines.vllm_engine"]


def serve(engine: Any, calls: int, answers: int) -> None:
    """Call methods of ``engine`` as lines on the descriptor ``calls`` ask for, until it is closed.

    The process then ends at once, with all that it started: also in the middle of a call.
    """
    lines: SimpleQueue[str] = SimpleQueue()
    for descriptor in (calls, answers):
        os.set_inheritable(descriptor, False)  # a child would keep the pipe open
    Thread(target=_read, args=(calls, lines), daemon=True).start()
    with os.fdopen(answers, "w", encoding="utf-8") as stream:
        while True:
            call = json.loads(lines.get())
            try:
                answer = {"result": getattr(engine, call["call"])(**call["arguments"])}
            except Exception as failure:  # noqa: BLE001  # of any kind: the caller names it
                answer = {"error": f"{type(failure).__name__}: {failure}"}
            print(json.dumps(answer), file=stream, flush=True)


def _read(calls: int, lines: SimpleQueue[str]) -> None:
    with os.fdopen(calls, encoding="utf-8") as stream:
        for line in stream:
            lines.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
