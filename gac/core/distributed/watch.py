"""Detect dead ranks from a background thread.

NCCL waits for a killed process until its timeout, and a process that decomposes a layer waits for nobody. So rank 0
keeps a receive open from every other process, and they from rank 0, in a gloo group of their own: it fails as soon as
the other process's connection closes. A run cannot go on without a process, and a wait for a GPU cannot be
interrupted: so the process exits, as NCCL's own watchdog would end it, but at once and with a name.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gac.core.errors import GacError

ERROR_GRACE_S = 5.0  # seconds in which rank 0 may meet the same error as another process, and print it
WAIT_S = 60.0  # seconds that other ranks wait for rank 0 to print an error, and that a failed call waits for its reason
_ENDED, _ERRED = 0, 1


class Watch:
    """Threads that wait for the end of other processes: on rank 0 for all of them, on the others for rank 0.

    They use a gloo ``group`` of their own; the ``store`` holds the error that a process ends with.
    """

    def __init__(self, group: dist.ProcessGroup, names: list[str], store: Any) -> None:
        self._group, self._names, self._store = group, names, store
        self._rank = dist.get_rank()
        self._peers = range(1, len(names)) if self._rank == 0 else range(1)
        self._exited_cleanly: dict[int, bool] = {}
        self._busy = self._failed = False
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._listen, args=(peer,), daemon=True) for peer in self._peers]
        for thread in self._threads:
            thread.start()

    def begin(self) -> None:
        """Begin a call that needs all processes; the process exits if another one has ended."""
        if self._failed:
            problem, expected = "a call after one that failed, under torchrun", "a run without a failure"
            raise GacError(problem, expected, "Start torchrun again: finished layers are read.")
        self._busy = True
        for rank, cleanly in [*self._exited_cleanly.items()]:
            self._exit_without(rank, cleanly)

    def end(self) -> None:
        self._busy = False

    def fail(self, failure: BaseException) -> None:
        """Record a failed call. Rank 0 and crashes go on to print the error; other ranks exit once rank 0 has."""
        self._failed = True
        if self._rank and isinstance(failure, GacError):
            self._store.set(f"gac/failed/{self._rank}", "\0".join((failure.given, failure.expected, failure.remedy)))
            self._send(_ERRED)
            self._threads[0].join(WAIT_S)
            _exit()

    def settle(self) -> None:
        """Wait to be terminated, after a collective failed because a peer died."""
        time.sleep(WAIT_S)

    def close(self) -> None:
        """Announce a clean exit and wait for the other ranks."""
        self._busy = False
        if self._failed and self._rank:
            _exit()
        self._send(_ENDED)
        for thread in self._threads:
            thread.join(WAIT_S if self._failed else None)
        if not self._failed and all(self._exited_cleanly.values()):
            with suppress(Exception):  # the groups may be destroyed already
                dist.destroy_process_group()

    def _listen(self, peer: int) -> None:
        message = torch.full((1,), -1, dtype=torch.int64)
        with suppress(RuntimeError):
            dist.recv(message, src=peer, group=self._group)
        if int(message) == _ERRED:
            self._report_error_of(peer)
        self._exited_cleanly[peer] = int(message) >= 0
        if self._busy:
            self._exit_without(peer, self._exited_cleanly[peer])

    def _report_error_of(self, peer: int) -> None:
        """Print another process's error and exit, unless this one meets an error too."""
        deadline = time.monotonic() + ERROR_GRACE_S
        while time.monotonic() < deadline:
            if self._failed:
                return
            time.sleep(0.05)
        self._print_and_exit(GacError(*bytes(self._store.get(f"gac/failed/{peer}")).decode().split("\0")))

    def _exit_without(self, peer: int, cleanly: bool) -> None:
        """Exit without a process that is needed. If rank 0 exited cleanly, it has printed the reason."""
        if self._failed:
            return
        if peer == 0 and cleanly:
            _exit()
        if peer == 0 and self._rank != 1:
            time.sleep(ERROR_GRACE_S)  # rank 1 prints it
            _exit()
        what = "has ended, and takes no part in this call" if cleanly else "is gone: it was killed, or has crashed"
        remedy = "Start torchrun again, with any number of processes: finished layers are kept and read."
        self._print_and_exit(
            GacError(f"{self._names[peer]} {what}", f"all {len(self._names)} processes of the run", remedy)
        )

    def _print_and_exit(self, failure: GacError) -> NoReturn:
        with self._lock:
            print(f"Error: {failure}", file=sys.stderr, flush=True)
            self._send(_ENDED)
            _exit()

    def _send(self, message: int) -> None:
        for peer in self._peers:
            with suppress(RuntimeError):
                dist.send(torch.tensor([message]), dst=peer, group=self._group)


def _exit() -> NoReturn:
    sys.stderr.flush()
    os._exit(1)
