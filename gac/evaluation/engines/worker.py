"""The worker's end of the pipes: calls are lines of JSON, and so are the answers.

A call is ``{"call": name, "arguments": {...}}``; an answer is ``{"result": {...}}``, or ``{"error": text}``.
"""

import json
import os
import signal
from queue import SimpleQueue
from threading import Thread
from typing import Any


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
