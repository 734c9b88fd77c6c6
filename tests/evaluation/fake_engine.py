"""An engine that reads what it does in the directory of its model: ``python fake_engine.py ... CALLS ANSWERS``.

``fake.json`` may have: ``ms`` and ``graph_ms``, one number a call of ``measure`` (the last one repeats); ``share``, the
least that it needs; ``tokens`` of its KV cache; ``fails``, ``ends`` or ``sleeps``, the call in which it does.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from gac.evaluation.engines.process import serve


class FakeEngine:
    def open(self, model: str, **arguments: Any) -> dict[str, Any]:
        self._folder = Path(model)
        self._behaviour = self._read()
        self._count = 0
        self._record("open", **arguments)
        if arguments["share"] < self._behaviour.get("share", 0):
            raise ValueError("No available memory for the cache blocks.")
        versions = {"vllm": "0.26.0", "torch": "2.11.0", "gac": "0.1.0", "cuda": "13.0"}
        return {"versions": versions, "device": "A GPU", "kv_cache_tokens": self._behaviour.get("tokens")}

    def _read(self) -> dict[str, Any]:
        """Read ``fake.json``; without one a run takes 1 ms a neuron of an MLP, half of that in a compressed model.

        Each of its modules takes 1 ms more.
        """
        if (stated := self._folder / "fake.json").exists():
            return json.loads(stated.read_text())
        config = json.loads((self._folder / "config.json").read_text())
        neurons, modules = config["intermediate_size"], config.get("gac", {}).get("modules", {})
        return {"ms": [neurons / (2 if "gac" in config else 1) + len(modules)]}

    def measure(self, workload: str, graph_alone: bool = False) -> dict[str, Any]:
        self._record("measure", workload=workload)
        values = {name: self._next(self._behaviour.get(name)) for name in ("ms", "graph_ms")}
        self._count += 1
        return values

    def _next(self, values: list[float] | None) -> float | None:
        return values[min(self._count, len(values) - 1)] if values else None

    def _record(self, call: str, **arguments: Any) -> None:
        with (self._folder.parent / "calls.jsonl").open("a") as calls:
            print(json.dumps([self._folder.name, call, arguments, os.getpid()]), file=calls)
        print("an engine's line", file=sys.stderr, flush=True)
        if self._behaviour.get("fails") == call:
            raise RuntimeError("a weight is ValueLinear; expected Linear.")
        if self._behaviour.get("ends") == call:
            print("Killed by something", flush=True)
            os._exit(3)
        if self._behaviour.get("sleeps") == call:
            time.sleep(600)


if __name__ == "__main__":
    serve(FakeEngine(), *map(int, sys.argv[-2:]))
