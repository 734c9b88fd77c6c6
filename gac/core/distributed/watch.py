"""How a process learns that another one is gone, whatever it is doing itself.

NCCL waits for a process that was killed until its time limit, and a process that decomposes a layer waits for nobody.
So rank 0 keeps a receive open from every other process, and they from rank 0, in a gloo group of their own: it fails
as soon as the other process's connection closes. A run in which one process is gone cannot go on, and what waits for a
GPU cannot be interrupted: so the process ends there, as NCCL's own watchdog would end it, but at once and by name.
"""

import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gac.core.errors import GacError

FAILED = 1
OWN_WORD = 5.0
"""Seconds that rank 0 has to meet the same error as another process by itself, and to say that."""
PATIENCE = 60.0
"""Seconds that others wait for rank 0 to say what failed, and that a failing call waits to learn why it failed."""
_ENDED, _ERRED = 0, 1


class Watch:
    """Threads that wait for the end of other processes: on rank 0 of all of them, on the others of rank 0.

    Args:
        group: a gloo group that nothing else uses.
        names: of all processes, by rank, for errors.
        store: where a process leaves the error that it ends with.
    """

    def __init__(self, group: dist.ProcessGroup, names: list[str], store: Any) -> None:
        self._group, self._names, self._store = group, names, store
        self._own = dist.get_rank()
        self._ended: dict[int, bool] = {}
        self._busy = self._failed = False
        self._mouth = threading.Lock()
        others = range(1, len(names)) if self._own == 0 else range(1)
        self._threads = [threading.Thread(target=self._listen, args=(rank,), daemon=True) for rank in others]
        for thread in self._threads:
            thread.start()

    def begin(self) -> None:
        """A call begins, which needs everybody.

        Raises:
            GacError: a call has failed before, or somebody is gone.
        """
        if self._failed:
            given, expected = "a call after one that failed, under torchrun", "a run without a failure"
            raise GacError(given, expected, "Start torchrun again: what was finished is read.")
        self._busy = True
        for rank, properly in [*self._ended.items()]:
            self._gone(rank, properly)

    def end(self) -> None:
        """The call has come to its end here: nobody is missed any more who ends after all have come to it."""
        self._busy = False

    def fail(self, failure: BaseException) -> None:
        """The call fails. Rank 0 goes on, to say why, and so does a crash; others end once rank 0 has said it."""
        self._failed = True
        if self._own and isinstance(failure, GacError):
            parts = (failure.given, failure.expected, failure.remedy)
            self._store.set(_key(self._own), "\0".join(parts))
            self._tell(_ERRED)
            self._threads[0].join(PATIENCE)
            _leave()

    def settle(self) -> None:
        """Wait for the end that the loss of another process is, after a call to it has failed."""
        time.sleep(PATIENCE)

    def close(self) -> None:
        """At the end of the process: nobody is missed any more, and nobody is left alone while others still work."""
        self._busy = False
        if self._failed and self._own:
            _leave()
        self._tell(_ENDED)
        for thread in self._threads:
            thread.join(PATIENCE if self._failed else None)
        if not self._failed and all(self._ended.values()):
            with suppress(Exception):  # of whoever destroyed the groups before
                dist.destroy_process_group()

    def _listen(self, rank: int) -> None:
        word = torch.zeros(1, dtype=torch.int64)
        properly = False
        with suppress(RuntimeError):
            dist.recv(word, src=rank, group=self._group)
            properly = True
        if properly and int(word) == _ERRED:
            self._heard(rank)
        self._ended[rank] = properly
        if self._busy:
            self._gone(rank, properly)

    def _heard(self, rank: int) -> None:
        """Say another process's error and end, unless this one has an error to say itself."""
        began = time.monotonic()
        while time.monotonic() - began < OWN_WORD:
            if self._failed:
                return
            time.sleep(0.05)
        self._say(GacError(*bytes(self._store.get(_key(rank))).decode().split("\0")))

    def _gone(self, rank: int, properly: bool) -> None:
        """End without a process that is needed. Where rank 0 ended properly it has said why."""
        if self._failed:
            return
        if properly and rank == 0:
            _leave()
        if not properly and rank == 0 and self._own != 1:
            time.sleep(OWN_WORD)  # rank 1 says it
            _leave()
        what = "has ended, and takes no part in this call" if properly else "is gone: it was killed, or has crashed"
        self._say(
            GacError(
                f"{self._names[rank]} {what}",
                f"all {len(self._names)} processes of the run",
                "Start torchrun again, with any number of processes: finished layers are kept and read.",
            )
        )

    def _say(self, failure: GacError) -> NoReturn:
        with self._mouth:
            print(f"Error: {failure}", file=sys.stderr, flush=True)
            self._tell(_ENDED)
            _leave()

    def _tell(self, word: int) -> None:
        """Everybody who listens to this process, as far as they are there."""
        for rank in range(1, len(self._names)) if self._own == 0 else range(1):
            with suppress(RuntimeError):
                dist.send(torch.tensor([word]), dst=rank, group=self._group)


def _key(rank: int) -> str:
    return f"gac/failed/{rank}"


def _leave() -> NoReturn:
    sys.stderr.flush()
    os._exit(FAILED)


def names_of(facts: list[Mapping[str, object]]) -> list[str]:
    """What errors call the processes."""
    return [f"rank {rank} of {len(facts)} (process {one['pid']} on {one['host']})" for rank, one in enumerate(facts)]
