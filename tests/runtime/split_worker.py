"""What each of two processes does with the checkpoints of a folder: ``torchrun ... split_worker.py FOLDER``.

Process 0 writes what it found to ``found.json``, process 1 to ``other.json``.
"""

import copy
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import gac
from gac.core.workloads import Workload
from gac.evaluation.latency import weight_bytes
from gac.evaluation.split import SlowestTimer, end_together, ranks_of_torchrun
from gac.measurement.embeddings import quantised_embeddings, replace_embeddings
from gac.models.shapes import Shapes
from gac.runtime.parallel.ranks import started
from gac.runtime.parallel.splitting import split as split_in_place
from gac.schemes import scheme_named
from gac_extensions.lab.shapes.bench import Bench
from gac_extensions.lab.shapes.models import model_of_shapes, planner_of_shapes, variant
from gac_extensions.lab.shapes.split import SplitShapes
from tests.compression.applying import IDS, logits
from tests.evaluation.test_latency import CountingTimer
from tests.models.small import small_config, small_model
from tests.runtime.split_models import INDIVISIBLE

RANK = int(os.environ["RANK"])
FOLDER = Path(sys.argv[1])
SAID: list[str] = []


def with_gac() -> dict[str, Any]:
    """``gac.load``, and transformers' factory with GAC imported."""
    names = sorted(path.parent.name for path in FOLDER.glob("*/config.json") if path.parent.name != INDIVISIBLE)
    found = {name: _compared(FOLDER / name) for name in names}
    split = gac.load(FOLDER / "llama-bf16", tp_plan="auto")
    static = _tokens(split) == _tokens(split, cache_implementation="static")
    return {"loaded": found, "errors": _errors(split), "static": static, "ends": _ends(), "bench": _bench()}


def _tokens(model: Any, **more: Any) -> Any:
    return model.generate(IDS[:1], max_new_tokens=6, do_sample=False, **more).tolist()


def _compared(path: Path) -> dict[str, Any]:
    """Logits and tokens of the split model beside those of the whole one."""
    whole = gac.load(path, dtype=torch.float32)
    SAID.clear()
    split = gac.load(path, tp_plan="auto", dtype=torch.float32)
    said = list(SAID)
    return {
        "error": float((logits(whole) - logits(split)).abs().max()),
        "same": _tokens(whole) == _tokens(split),
        "bytes": [_bytes(one) for one in (whole, split)] if hasattr(whole, "model") else [],
        "said": said,
        "names": set(whole.state_dict()) >= set(split.state_dict()),
    }


def _bytes(model: Any) -> int:
    """Of the layers."""
    return sum(one.nbytes for one in (*model.model.layers.parameters(), *model.model.layers.buffers()))


def _errors(split: Any) -> dict[str, str]:
    """What is raised, here and in the other process."""
    apart = FOLDER / ("llama-bf16" if RANK == 0 else "llama-w8a16")
    attempts = {
        "indivisible": lambda: gac.load(FOLDER / INDIVISIBLE, tp_plan="auto"),
        "apart": lambda: gac.load(apart, tp_plan="auto"),
        "saved": lambda: split.save_pretrained(FOLDER / f"again-{RANK}"),
        "size": lambda: type(split).from_pretrained(FOLDER / "llama-bf16", tp_size=4),
        "trained": lambda: split(inputs_embeds=torch.zeros(1, 4, 64, requires_grad=True)),
    }
    return {name: _raised(attempt) for name, attempt in attempts.items()}


def _raised(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except Exception as failure:  # noqa: BLE001 - its type and text are compared
        return f"{type(failure).__name__}: {failure}"
    return "nothing"


def _ends() -> dict[str, float]:
    """Embeddings and heads in a storage, tied and not: how far logits are from the whole model's."""
    found = {}
    for scheme, tied in (("w8a16", True), ("w8a16", False), ("bf16", True)):
        whole = small_model(small_config("llama", tie_word_embeddings=tied))
        replace_embeddings(whole, quantised_embeddings(whole, scheme_named(scheme)))
        part = copy.deepcopy(whole)
        split_in_place(part, started())
        found[f"{scheme} {tied}"] = float((logits(whole) - logits(part)).abs().max())
    return found


def _bench() -> list[list[Any]]:
    """Names and bytes of versions, and those of one process that is alone; every round is the slowest one's."""

    class Slower(CountingTimer):
        """Process 1 takes a byte's time longer."""

        def round(self, held: Any) -> Any:
            return super().round([one + RANK for one in held])

    shapes: Any = Shapes("llama", 128, 512, 2, 4, 2, 32, 512)
    workload, ranks = Workload.parse("decode:2@8"), ranks_of_torchrun()
    planner = planner_of_shapes(shapes, [workload], "nvidia-h100-80gb-hbm3", schemes=("w8a16",))
    assert ranks is not None
    made = SplitShapes(shapes, ranks, torch.float32)
    timer: Any = SlowestTimer(Slower(), ranks)
    bench = Bench(
        made.dense, planner.problem.sites, planner.problem.timing, planner.dense_versions(), timer, None, made
    )
    versions = [planner.by_default(0.7), planner.uniform("w8a16")]
    whole = model_of_shapes(shapes, device="cpu", dtype=torch.float32)
    alone = [weight_bytes(variant(whole, one.choices)) for one in (*bench.dense_versions, *versions)]
    found = list(bench.run(versions, workload))
    assert all(one.predicted_ns is None for one in found)
    return [[one.timed.name, one.timed.latency.median_ns, size] for one, size in zip(found, alone, strict=True)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    listener = logging.Handler()
    listener.emit = lambda record: SAID.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gac").addHandler(listener)
    distributed.init_process_group("gloo")
    (FOLDER / ("found.json" if RANK == 0 else "other.json")).write_text(json.dumps(with_gac()))
    end_together(started())
    assert not distributed.is_initialized()
